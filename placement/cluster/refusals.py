"""Members whose reports are not taken in, because another one has the same name: the first counts until it is away.
Groups are told apart by name, also in operators' calls, and ledgers by their node."""

from __future__ import annotations

from services.telemetry import log

_log = log.get(__name__)


class Refusals:
    """Addresses whose groups and ledgers are refused. The log says so once for each reason."""

    def __init__(self) -> None:
        self._groups: dict[str, str] = {}
        """Address -> why the group that reports from there is not taken in; empty if it is."""
        self._ledgers: dict[str, str] = {}
        """Address -> why the ledger that is reported from there is not taken in; empty if it is."""
        self._reporting: dict[str, str] = {}
        """Node -> address of the balloond that reports its ledger."""

    def refuses_group(self, address: str, name: str, holder: str) -> bool:
        """Whether the group at the address is refused; to be called with each of its reports. `holder`: address of the
        reachable group of that name; empty if there is none."""
        why = f"the group at {holder} is called {name} as well" if holder not in ("", address) else ""
        return _noted(self._groups, "group refused", address, why)

    def forget_group(self, address: str) -> None:
        self._groups.pop(address, None)

    def refuses_ledger(self, address: str, node: str, *, is_away: bool) -> bool:
        """Whether the ledger that a balloond reports is refused, as another balloond reports one for the same node. To
        be called with each report, and with `is_away` when the balloond at the address is lost."""
        holder = self._reporting.setdefault(node, address)
        if holder == address:
            self._ledgers[address] = ""
            if is_away:
                del self._reporting[node]
            return False
        if not is_away:
            _noted(self._ledgers, "ledger refused", address, f"{holder} is of a node {node!r} as well")
        return True

    def forget_ledger(self, address: str) -> None:
        self._ledgers.pop(address, None)

    def has_ledger(self, address: str) -> bool:
        """Whether the balloond at the address reports a node's ledger."""
        return address in self._reporting.values()


def _noted(reasons: dict[str, str], event: str, address: str, why: str) -> bool:
    """Notes why an address is refused, and logs it if that is new; True unless it is empty."""
    if why and why != reasons.get(address):
        _log.error(event, address=address, why=why)
    reasons[address] = why
    return bool(why)
