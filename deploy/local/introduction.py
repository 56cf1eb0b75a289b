"""The text that the person at the terminal sees once the system serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protos import common_pb2, placement_pb2
from services.wording import enums

_SUBJECTS = {"llama-debian": "What is Debian?", "qwen2-python": "What is a list?", "qwen3-perl": "What is Perl?"}
"""Model -> a question for it; each demonstration model knows one subject."""


def introduction(
    processes: Mapping[str, int],
    cluster: placement_pb2.Cluster,
    routes: placement_pb2.Routes,
    problems: Mapping[str, str],
    http: str,
    prismctl: str,
    *,
    keys: bool = False,
    page: bool = True,
) -> str:
    """`processes`: pids by name. `problems`: by group, why it has no warm engine. `http`: address of the API.
    `prismctl`: its command line for this system. `keys`: whether requests need one of the API keys. `page`: whether the
    gateway shows its page."""
    lines = ["  process                  pid"]
    lines += [f"  {name:<22} {pid:>6}" for name, pid in processes.items()]
    lines += ["", "  devices                 memory"]
    for group in cluster.groups:
        problem = problems.get(group.group, "")
        lines.append(f"  {group.group:<22} {_size(group.capacity_bytes):>9}{'   ' + problem if problem else ''}")
    width = max([24, *(len(route.model.name) for route in routes.routes)])
    lines += ["", f"  {'model':<{width}}   weights   state", *(_model(route, width) for route in routes.routes)]
    names = [route.model.name for route in routes.routes if not route.error]
    lines += ["", _requests(names, http, keys) if names else _nothing_to_ask(routes, prismctl)]
    lines += ["", f"  {prismctl} status", _page(http, keys) if page else ""]
    if names:
        lines.append(
            "A model is loaded at its first request, which waits for it; when memory is short, an idle one leaves."
        )
    return "\n".join([*lines, "Ctrl-C ends everything."])


def _requests(names: Sequence[str], http: str, keys: bool) -> str:
    """Command lines of two requests, to models of these names."""
    first, second = names[0], names[len(names) // 2]
    url = f"http://{http}/v1/chat/completions"
    headers = "-H 'content-type: application/json'" + (' -H "authorization: Bearer $KEY"' if keys else "")
    return f"""Try, in another shell{", with KEY=sk-..., one of the API keys" if keys else ""}:

  curl -s {url} {headers} \\
    -d '{{"model": "{first}", "temperature": 0, "messages": [{{"role": "user", "content": "{question(first)}"}}]}}'

  curl -sN {url} {headers} \\
    -d '{{"model": "{second}", "temperature": 0, "stream": true,
         "messages": [{{"role": "user", "content": "{question(second)}"}}]}}'"""


def _nothing_to_ask(routes: placement_pb2.Routes, prismctl: str) -> str:
    """Why no model answers requests, and what to do in another shell."""
    add = f"add one with `{prismctl} models add NAME FOLDER`"
    if not routes.routes:
        return f"No model can be asked yet, because the catalogue has none: {add}."
    return (
        "No model can be asked yet, because every model is in error, as said above: mend its files and follow it with\n"
        f"`{prismctl} models list`, or {add}."
    )


def _page(http: str, keys: bool) -> str:
    login = " (any user, and an admin's key as password)" if keys else ""
    return f"\nIn a browser, to watch it and to try models: http://{http}/ui{login}\n"


def question(model: str) -> str:
    """A question that a model of this name can answer."""
    return _SUBJECTS.get(model, "What is the capital of France?")


def _model(route: placement_pb2.Route, width: int) -> str:
    if route.error:
        where = "" if route.model.path in route.error else f"{route.model.path}: "
        return f"  {route.model.name:<{width}} {'':>9}   error: {where}{route.error}"
    state = enums.name(common_pb2.Residency, route.residency).replace("_", " ")
    return f"  {route.model.name:<{width}} {_size(route.model.weights_bytes):>9}   {state}"


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"
