"""Sockets that a service manager hands over."""

import json
import os
import socket
import subprocess
import sys

from services.ipc import inherited

_ASK = """
import json, os
os.environ["LISTEN_PID"] = str(os.getpid())
from services.ipc import inherited
found = inherited.listeners()
print(json.dumps([[s.getsockname()[1], s.get_inheritable()] for s in found]), [k for k in os.environ if "LISTEN" in k])
"""


def test_inherited_sockets_for_another_process_are_not_taken():
    environment = {"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"}
    assert inherited.listeners(environment) == [] and environment == {}
    assert inherited.listeners({}) == []


def test_inherited_sockets_are_found_in_order_and_not_passed_to_children():
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        given = [one.fileno(), other.fileno()]
        script = f"exec 3<&{given[0]} 4<&{given[1]}; exec {sys.executable} -c '{_ASK}'"
        environment = {**os.environ, "LISTEN_FDS": "2", "LISTEN_FDNAMES": "http:other"}
        said = subprocess.run(
            ["bash", "-c", script], pass_fds=given, env=environment, capture_output=True, text=True, check=True
        ).stdout
        found, left = said.split("]] ")
        assert json.loads(found + "]]") == [[each.getsockname()[1], False] for each in (one, other)]
        assert left.strip() == "[]"
