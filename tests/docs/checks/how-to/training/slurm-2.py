import os
import re
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port


def block(page, beginning):
    return re.search(rf"```python\n({beginning}.*?)```", page.read_text(), re.DOTALL)[1]


lines = block(Path(PAGE), "os.environ")
script = block(Path(PAGE).with_name("ddp.md"), "import torch")
script = re.sub(r"dist\.init_process_group.*?\n\)\n", lambda _: lines, script, flags=re.DOTALL)
script = re.sub(r'torch\.device\("cuda", .*\)', 'torch.device("cpu")', script).replace('"nccl"', '"gloo"')
script = script.replace("torch.cuda.set_device(device)\n", "")
Path("slurm_train.py").write_text(f"import os\n{script}")
environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CACHE": "ssd/slurm"}
environment |= {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
environment |= {"SLURM_LOCALID": "0", "SLURM_CPUS_PER_TASK": "2"}
tasks = [
    subprocess.Popen(
        [sys.executable, "slurm_train.py"],
        env=os.environ | environment | {"SLURM_PROCID": rank, "SLURM_NODEID": rank},
    )
    for rank in "01"
]
assert [task.wait() for task in tasks] == [0, 0]
assert Path("run.pt").exists()
