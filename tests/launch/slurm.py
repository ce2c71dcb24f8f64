"""Run a real Slurm cluster on this machine: two nodes of one core, and a partition that preempts the other."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from waiting import HOUR, wait_for

CONFIGURATION = """
ClusterName=atoll
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
MinJobAge=300
ReturnToService=2
SlurmdTimeout=60
SlurmctldTimeout=60
InactiveLimit=0
Waittime=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 MaxTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP
"""


def missing_requirement() -> str | None:
    """Return the reason why no cluster can be started here, or None."""
    if os.geteuid() != 0:
        return "SLURM IS NOT TESTED: its daemons need root"
    absent = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]
    return f"SLURM IS NOT TESTED: {', '.join(absent)} not found; see scripts/install_debian.sh" if absent else None


class Cluster:
    """Daemons as foreground child processes."""

    def __init__(self) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="slurm-")
        )  # short, because the path of a socket has at most 108 characters
        self.conf = self.folder / "slurm.conf"
        self.daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        self.conf.write_text(
            CONFIGURATION.format(folder=self.folder, host=socket.gethostname().split(".")[0], ports=free_ports(3))
        )
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        names = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log"}
        options = [f"--{key}={self.folder / name}" for key, name in {**names, "seed-file": "munge.seed"}.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        wait_for(lambda: (self.folder / "munge.sock").exists(), "munged")
        self._daemon("slurmctld", "-D", "-c", "-f", str(self.conf))
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node, "-f", str(self.conf))
        wait_for(lambda: self.first_line_of("sinfo", "--noheader", "--format=%D %T") == "2 idle", "two idle nodes")

    def _daemon(self, *command: str) -> None:
        with (self.folder / "daemons.txt").open("a") as log:
            self.daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def first_line_of(self, *command: str) -> str:
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return result.stdout.strip().splitlines()[0] if result.stdout.strip() else result.stderr

    def node_of(self, job: str) -> str:
        return self.first_line_of("squeue", "--noheader", "--states=RUNNING", f"--jobs={job}", "--format=%N")

    def stop(self) -> None:
        subprocess.run(["scancel", "--user=root"], env=self.environment, check=False)
        time.sleep(0.5)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(HOUR)
        shutil.rmtree(self.folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for held in sockets:
        held.bind(("127.0.0.1", 0))
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports
