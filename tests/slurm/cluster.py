"""A real Slurm with several nodes on one machine: no systemd, no container, no GPU.

Each node is a slurmd in namespaces of its own (network, host name, processes, mounts, IPC), behind
a bridge. So a node can lose its power or its network, and ranks on two nodes meet as they would on
two machines. Files are shared, as on a cluster. Needs root and Debian's packages in `PACKAGES`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "util-linux")
_PROGRAMS = (
    "slurmctld",
    "slurmd",
    "sbatch",
    "munged",
    "ip",
    "bridge",
    "unshare",
    "setpriv",
    "mknod",
)
BOOT = Path(__file__).with_name("boot_node.sh")

BRIDGE = "rlslurm0"
NETWORK = "10.83.0"
CONTROLLER = f"{NETWORK}.254"
MAC = "02:00:0a:53:00:fe"

# Short times, so that tests are: a silent node is given up after 11 to 16 seconds.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}({controller})
SlurmctldPort=16917
SlurmdPort=16918
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/spool/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
PropagateResourceLimits=NONE
# More CPUs and memory than there are.
SlurmdParameters=config_overrides
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,bf_continue
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout={node_timeout}
MessageTimeout=5
KillWait=5
MinJobAge=300
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=DEFAULT CPUs={cpus} RealMemory=100000 Gres=gpu:{gpus} State=UNKNOWN
NodeName=node[1-{nodes}] NodeAddr={network}.[1-{nodes}]
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP
PartitionName=main Default=YES PriorityTier=10
PartitionName=high PriorityTier=100 PreemptMode=OFF
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
"""

FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}


def missing() -> str | None:
    """Why there can be no cluster on this machine, or None."""
    if os.uname().sysname != "Linux":
        return "a Slurm cluster needs Linux"
    if os.geteuid() != 0:
        return "a Slurm cluster with network namespaces needs root"
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed: apt-get install {' '.join(PACKAGES)}"
    # A container may be root and still not be allowed what a node needs.
    for command in (
        "unshare --mount --pid --fork true",
        "ip netns add rlprobe",
        "ip netns del rlprobe",
    ):
        if subprocess.run(command.split(), capture_output=True, check=False).returncode:
            return f"this machine does not allow what nodes need: {command}"
    return None


class Cluster:
    """The cluster, from `start` to `stop`.

    Args:
        nodes: How many; they are named node1, node2, ...
        cpus, gpus: Of each node, as Slurm sees it.
        node_timeout: Seconds after which a silent node counts as failed.
    """

    def __init__(self, nodes: int, cpus: int = 4, gpus: int = 2, node_timeout: int = 5) -> None:
        self.nodes = nodes
        self.folder = Path(tempfile.mkdtemp(prefix="rl_megatron_slurm_"))
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "etc/slurm.conf")}
        self._cpus, self._gpus, self._node_timeout = cpus, gpus, node_timeout
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._booted: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Boot everything, and wait until every node is idle."""
        self._remove_network()
        self._write_files()
        # Else its address follows those of the nodes that are up, and the others look for it.
        _do("ip", "link", "add", BRIDGE, "address", MAC, "type", "bridge", "forward_delay", "0")
        _do("ip", "addr", "add", f"{CONTROLLER}/24", "dev", BRIDGE)
        _do("ip", "link", "set", BRIDGE, "up")
        f = self.folder
        self._spawn(
            *("munged", "--foreground", f"--key-file={f}/munge.key", f"--socket={f}/munge.sock"),
            *(f"--pid-file={f}/munge.pid", f"--log-file={f}/log/munge.log"),
            # Its two threads would serve all nodes here, each of which has its own on a cluster.
            *(f"--seed-file={f}/munge.seed", "--num-threads=10"),
        )
        _until(lambda: (f / "munge.sock").exists(), 10, "munged")
        self._controller = self._spawn("slurmctld", "-D")
        for number in range(1, self.nodes + 1):
            self.boot(number)
        _until(lambda: self._count("idle") == self.nodes, 60, "all nodes idle")

    def stop(self) -> None:
        """End all of it and remove its folder."""
        processes = [*self._booted.values(), *reversed(self._daemons)]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        self._remove_network()
        shutil.rmtree(self.folder, ignore_errors=True)

    def boot(self, number: int) -> None:
        """Start a node, the first time or after a crash."""
        space, link = f"rlnode{number}", f"rlnode{number}"
        for kind in ("link", "netns"):
            with contextlib.suppress(subprocess.CalledProcessError):  # not there the first time
                _do("ip", kind, "del", link)
        _do("ip", "netns", "add", space)
        _do("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        _do("ip", "link", "set", link, "master", BRIDGE, "up")
        _do("ip", "-n", space, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _do("ip", "-n", space, "link", "set", device, "up")
        self._booted[number] = self._spawn(
            *("ip", "netns", "exec", space, "unshare", "--uts", "--ipc", "--mount", "--pid"),
            *("--fork", "--kill-child", "--mount-proc"),
            *("bash", str(BOOT), f"node{number}", str(self.folder)),
            daemon=False,
        )

    def crash(self, number: int) -> None:
        """Take the power of a node away: its peers hear nothing more, not even an end."""
        _do("ip", "link", "set", f"rlnode{number}", "down")
        node = self._booted.pop(number)
        node.kill()
        node.wait()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Inside, the controller answers nothing."""
        self._controller.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._controller.send_signal(signal.SIGCONT)

    def isolate(self, *numbers: int, on: bool = True) -> None:
        """Cut these nodes off from each other; each still reaches the controller. Or join them."""
        for number in numbers:
            state = "on" if on else "off"
            _do("bridge", "link", "set", "dev", f"rlnode{number}", "isolated", state)

    def call(self, *command: str, **environment: str) -> str:
        """Output of a Slurm command."""
        done = subprocess.run(
            command,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says, by field."""
        shown = self.call("scontrol", "-o", "show", "job", job)
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def log(self, lines: int = 40) -> str:
        """The last lines of what each daemon has written."""
        tail = ("tail", "-v", "-n", str(lines), *sorted((self.folder / "log").glob("*.log")))
        return subprocess.run(tail, capture_output=True, text=True, check=False).stdout

    def wait(self, job: str, seconds: float = 60) -> dict[str, str]:
        """The job, when it is in a final state."""

        def ended() -> dict[str, str] | None:
            found = self.job(job)
            return found if found["JobState"] in FINAL else None

        return _until(ended, seconds, f"end of job {job}")

    def wait_until_pending(self, job: str, seconds: float = 60) -> dict[str, str]:
        """The job, when it waits for its next attempt."""

        def pending() -> dict[str, str] | None:
            found = self.job(job)
            assert found["JobState"] not in FINAL, found
            return (
                found if (found["JobState"], found["Reason"]) == ("PENDING", "BeginTime") else None
            )

        return _until(pending, seconds, f"requeue of job {job}")

    def start_again(self, job: str, seconds: float = 60) -> None:
        """Start a requeued job that would else wait for two minutes.

        Slurm refuses a start in the second of the requeue, and forgets one asked for before it.
        """
        self.wait_until_pending(job, seconds)
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now+2seconds")

    def _spawn(self, *command: str, daemon: bool = True) -> subprocess.Popen[bytes]:
        # They die with the tests, however these end.
        guarded = ["setpriv", "--pdeathsig", "KILL", *command]
        log = (self.folder / "log/output.log").open("ab")
        process = subprocess.Popen(
            guarded, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        log.close()
        if daemon:
            self._daemons.append(process)
        return process

    def _write_files(self) -> None:
        f, etc = self.folder, self.folder / "etc"
        f.chmod(0o755)  # munged refuses a folder that others could write
        for name in ("etc", "state", "spool", "log", "dev"):
            (f / name).mkdir()
        (f / "munge.key").write_bytes(os.urandom(1024))
        (f / "munge.key").chmod(0o600)
        for number in range(self._gpus):
            # slurmd takes only a device for one.
            os.mknod(f / f"dev/nvidia{number}", 0o20666, os.makedev(1, 3))
        host = socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(
            host=host,
            controller=CONTROLLER,
            network=NETWORK,
            folder=f,
            nodes=self.nodes,
            cpus=self._cpus,
            gpus=self._gpus,
            node_timeout=self._node_timeout,
        )
        (etc / "slurm.conf").write_text(text)
        gpus = f"Name=gpu File={f}/dev/nvidia[0-{self._gpus - 1}]\n"
        (etc / "gres.conf").write_text(gpus if self._gpus > 1 else gpus.replace("[0-0]", "0"))
        # The plugin that starts whatever is mounted, though no cgroup is used.
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        names = [f"{NETWORK}.{number} node{number}" for number in range(1, self.nodes + 1)]
        hosts = ["127.0.0.1 localhost", f"{CONTROLLER} {host}", *names]
        (etc / "hosts").write_text("\n".join(hosts) + "\n")
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        (etc / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")

    def _count(self, state: str) -> int:
        asked = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "main", "-t", state, "-o", "%N"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return len(asked.stdout.split())

    @staticmethod
    def _remove_network() -> None:
        """Take down what this cluster, or one that was killed, has set up."""
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        for space in re.findall(r"^rlnode\d+", spaces.stdout, re.MULTILINE):
            _do("ip", "netns", "del", space)
        links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True)
        for link in re.findall(rf"^(?:rlnode\d+|{BRIDGE})", links.stdout, re.MULTILINE):
            with contextlib.suppress(subprocess.CalledProcessError):  # gone with its namespace
                _do("ip", "link", "del", link)


@contextlib.contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, started; after the one that another process has, since names are fixed."""
    with (Path(tempfile.gettempdir()) / "rl_megatron_slurm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """What `condition` returns, as soon as it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)
    return found
