"""`python -m testing.fleet.as_version 2.0 MODULE ...`: a service that speaks another version of the protocol."""

import runpy
import sys

from services.rpc import rpc

if __name__ == "__main__":
    version, module = sys.argv[1:3]
    rpc.PROTOCOL = tuple(map(int, version.split(".")))
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
