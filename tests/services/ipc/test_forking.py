import os
import subprocess
import sys

import pytest


def test_grpc_fork_handlers_are_off_in_tests():
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"


@pytest.mark.parametrize("package", ["gpu_scheduler", "deploy.local"])
def test_grpc_fork_handlers_are_turned_off_by_packages_that_start_processes(package):
    code = f"import sys, {package}, os; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'], 'grpc' in sys.modules)"
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.split() == ["0", "False"]
