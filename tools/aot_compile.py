"""One Triton kernel to the machine code of a GPU that need not be here, and what is in it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from rl_megatron.kernels.launch import Launch


@dataclass(frozen=True)
class Target:
    """A kind of GPU, and the shared memory that a block may have there."""

    gpu: GPUTarget
    shared_bytes: int


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
# HFMA2.MMA is no matrix instruction; it sets a register.
MATRIX = re.compile(r"(?:[HIDQBO]|HG|IG|QG|BG|UTC\w*)MMA\b")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """What the machine code of a kernel is made of.

    Attributes:
        registers: Of a thread.
        spills: Instructions that move registers to and from memory; on AMD the registers moved,
            vector ones only: scalar ones move into vector ones.
        tensor_core: Matrix instructions.
        load_bits: Of the widest load from global memory.
    """

    kernel: str
    target: str
    registers: int
    spills: int
    shared_bytes: int
    tensor_core: int
    load_bits: int

    def faults(self) -> list[str]:
        """What is wrong with it, in words."""
        found = []
        if self.spills:
            found.append(
                f"{self.kernel} on {self.target}: {self.spills} spills; "
                "take a smaller block or more warps"
            )
        limit = TARGETS[self.target].shared_bytes
        if self.shared_bytes > limit:
            found.append(
                f"{self.kernel} on {self.target}: {self.shared_bytes} bytes of shared memory, "
                f"at most {limit}; take a smaller block or fewer stages"
            )
        return found


def compile_launch(name: str, launch: Launch, target: str) -> Compiled:
    """Compile what `launch` would have started, as Triton specialises it for these arguments."""
    gpu = TARGETS[target].gpu
    backend = make_backend(gpu)
    kernel = launch.kernel
    options, signature, constants, attributes = specialised(launch, backend)
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=gpu, options=options.__dict__)
    shared_bytes = compiled.metadata.shared
    if gpu.backend == "hip":
        return of_amdgcn(name, target, shared_bytes, compiled.asm["amdgcn"])
    return of_cubin(name, target, shared_bytes, compiled.asm["cubin"])


def specialised(launch: Launch, backend: Any) -> tuple[Any, Any, Any, Any]:
    """Options, signature, constants and attributes: what decides which binary a launch runs."""
    kernel, settings = launch.kernel, launch.settings_on(backend.target.backend)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.args, **settings)
    packed: tuple[Any, Any, Any, Any] = kernel._pack_args(
        backend, settings, bound, specialization, options
    )
    return packed


def of_cubin(name: str, target: str, shared_bytes: int, cubin: bytes) -> Compiled:
    """What NVIDIA's disassembler says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", "-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    opcodes = re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text, re.M
    )
    loads = [opcode for opcode in opcodes if opcode.startswith("LDG")]
    widths = [
        int(found[1]) if (found := re.search(r"\.(64|128|256)\b", op)) else 32 for op in loads
    ]
    return Compiled(
        kernel=name,
        target=target,
        registers=int(re.findall(r"\bREG:(\d+)", text)[-1]),
        spills=sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes),
        shared_bytes=shared_bytes,
        tensor_core=sum(bool(MATRIX.match(opcode)) for opcode in opcodes),
        load_bits=max(widths, default=0),
    )


def of_amdgcn(name: str, target: str, shared_bytes: int, text: str) -> Compiled:
    """What the assembly and its notes say."""

    def note(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s+(\d+)", text)[-1])

    loads = re.findall(r"\b(?:global|buffer)_load_dword(?:x(\d))?\b", text)
    return Compiled(
        kernel=name,
        target=target,
        registers=note("vgpr_count"),
        spills=note("vgpr_spill_count"),
        shared_bytes=shared_bytes,
        tensor_core=len(re.findall(r"\bv_mfma", text)),
        load_bits=max((32 * int(width or 1) for width in loads), default=0),
    )
