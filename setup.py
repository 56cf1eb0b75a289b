"""What a wheel has beside the packages that pyproject.toml lists: the generated protobuf code, and files of the tree
that `prism serve` and `prism install` read (deploy/places.py finds them)."""

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = (
    "requirements/*.txt",
    "deploy/local/catalogue.toml",
    "deploy/compose/compose*.yaml",
    "deploy/k8s/*.yaml",
    "deploy/systemd/prism*",
    "examples/models/*/*.json",
    "examples/models/*/*.safetensors",
)


class BuildPackages(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # the tree itself is installed: `make protos` generates there
        lib = Path(self.build_lib)
        protos = sorted(map(str, Path("protos").glob("*.proto")))
        out = [f"--{kind}_out={lib}" for kind in ("python", "pyi", "grpc_python")]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *out, *protos], check=True)
        for pattern in SHIPPED:
            for path in Path().glob(pattern):
                (lib / "deploy" / "shipped" / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, lib / "deploy" / "shipped" / path)


setup(cmdclass={"build_py": BuildPackages})
