"""Reads the faults of `local_faults` from a scenario's tables, and refuses what cannot be.

Owns: their keys, and which of them go together. Does not own: tables, lines and moments (`scenario_reader`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from ckptd.chaos.local_faults import (
    DEEDS_OF,
    DISK_FAULTS_OF,
    SIZE_MIB,
    ClockFault,
    DiskFault,
    LocalFault,
    SlowFault,
)
from ckptd.chaos.scenario import Fault, Moment, Target

_KEYS_OF = {
    "slow": ("percent", "for_s"),
    "disk": ("disk", "fault", "left_kib", "size_mib", "for_s"),
    "clock": ("shift_s", "for_s"),
}
_LEAST_SHIFT_S, _MOST_SHIFT_S = 60, 86_400


class LocalFaultReader(ABC):
    """The part of the reader that knows these deeds."""

    @abstractmethod
    def _only(self, table: Mapping[str, object], allowed: tuple[str, ...], where: str) -> None: ...

    @abstractmethod
    def _text(self, table: Mapping[str, object], key: str, where: str) -> str | None: ...

    @abstractmethod
    def _number(self, table: Mapping[str, object], key: str, where: str) -> int | None: ...

    @abstractmethod
    def _choice(self, table: Mapping[str, object], key: str, allowed: tuple[str, ...], where: str) -> str | None: ...

    @abstractmethod
    def _target(self, text: str, where: str) -> Target: ...

    @abstractmethod
    def _moment_at(self, table: Mapping[str, object], where: str) -> Moment: ...

    @abstractmethod
    def _error(self, where: str, text: str) -> Exception: ...

    def _local_fault(self, table: Mapping[str, object], where: str) -> Fault:
        do = str(table["do"])
        self._only(table, ("do", "target", "at", *_KEYS_OF.get(do, ())), where)
        local: LocalFault | None = None
        if do == "slow":
            local = self._slow(table, where)
        elif do == "disk":
            local = self._disk(table, where)
        elif do == "clock":
            local = self._clock(table, where)
        target = self._local_target(table, do, local, where)
        moment = self._moment_at(table, where)
        if moment.failpoint is not None:
            raise self._error(f"{where}.at", "a failpoint kills or stops an agent or the coordinator, nothing else")
        return Fault(do=do, target=target, at=moment, local=local)

    def _local_target(self, table: Mapping[str, object], do: str, local: LocalFault | None, where: str) -> Target:
        text = self._text(table, "target", f"{where}.target")
        if isinstance(local, DiskFault) and local.disk == "store":
            if text is not None:
                raise self._error(f"{where}.target", "the store's disk is nobody's own: leave target out")
            return Target(kind="store")
        target = self._target(text or "", f"{where}.target")
        if target.kind not in DEEDS_OF[do]:
            raise self._error(
                f"{where}.do", f"{do} cannot be done to {target.kind}; {do} goes with: {', '.join(DEEDS_OF[do])}"
            )
        return target

    def _slow(self, table: Mapping[str, object], where: str) -> SlowFault:
        percent, for_s = (self._number(table, key, f"{where}.{key}") for key in ("percent", "for_s"))
        if percent is None or for_s is None:
            raise self._error(where, "slow needs percent (1..90, the share of time that it runs) and for_s")
        if percent > 90:
            raise self._error(f"{where}.percent", f"percent is a whole number from 1 to 90, not {percent}")
        return SlowFault(percent=percent, for_s=for_s)

    def _disk(self, table: Mapping[str, object], where: str) -> DiskFault:
        disk = self._choice(table, "disk", tuple(DISK_FAULTS_OF), f"{where}.disk")
        if disk is None:
            raise self._error(where, f"a fault of a disk needs disk, one of {', '.join(DISK_FAULTS_OF)}")
        every = tuple(dict.fromkeys(kind for kinds in DISK_FAULTS_OF.values() for kind in kinds))
        kind = self._choice(table, "fault", every, f"{where}.fault")
        if kind is None or kind not in DISK_FAULTS_OF[disk]:
            allowed = ", ".join(DISK_FAULTS_OF[disk])
            text = "needs fault" if kind is None else f"of {disk} cannot be {kind}"
            raise self._error(f"{where}.fault" if kind else where, f"a fault of a disk {text}; allowed: {allowed}")
        fault = DiskFault(
            disk=disk,
            kind=kind,
            left_kib=self._number(table, "left_kib", f"{where}.left_kib") or 0,
            size_mib=self._number(table, "size_mib", f"{where}.size_mib") or SIZE_MIB,
            for_s=self._number(table, "for_s", f"{where}.for_s"),
        )
        if fault.left_kib and kind != "full":
            raise self._error(f"{where}.left_kib", "left_kib goes with full only")
        if "size_mib" in table and not fault.is_mounted:
            raise self._error(f"{where}.size_mib", "size_mib goes with full and read_only only")
        return fault

    def _clock(self, table: Mapping[str, object], where: str) -> ClockFault:
        shift = table.get("shift_s")
        if isinstance(shift, bool) or not isinstance(shift, int) or not _LEAST_SHIFT_S <= abs(shift) <= _MOST_SHIFT_S:
            raise self._error(
                f"{where}.shift_s" if "shift_s" in table else where,
                f"a fault of a clock needs shift_s, seconds from {_LEAST_SHIFT_S} to {_MOST_SHIFT_S}, "
                f"negative where it is behind; not {shift!r}",
            )
        return ClockFault(shift_s=shift, for_s=self._number(table, "for_s", f"{where}.for_s"))
