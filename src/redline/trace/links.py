"""Who launched what: device work to the call that launched it, and that to the operator it came from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from redline.trace.columns import UNKNOWN, Ints, Trace
from redline.trace.nesting import Nesting


@dataclass(frozen=True)
class Links:
    """Worked out once per trace and shared by all tables. Rows that nothing is known of hold UNKNOWN."""

    trace: Trace

    @cached_property
    def nesting(self) -> Nesting:
        operators = self.trace.operators
        return Nesting(operators.thread, operators.start, operators.end)

    @cached_property
    def call(self) -> Ints:
        """For each row of device work, the call that launched it. A graph's kernels share one call."""
        calls = self.trace.calls
        # The runtime's call and the driver's call below it may share a number: the earlier one is the host's.
        order = np.lexsort((calls.start, calls.correlation))
        return _look_up(calls.correlation, order, self.trace.work.correlation)

    @cached_property
    def launched_at(self) -> Ints:
        """When the host asked for each row of device work; UNKNOWN when that is not in the trace."""
        known = self.call >= 0
        found = np.full(len(self.call), UNKNOWN, np.int64)
        found[known] = self.trace.calls.start[self.call[known]]
        return found

    @cached_property
    def operator(self) -> Ints:
        """For each row of device work, the innermost operator that launched it."""
        known = self.call >= 0
        calls = np.unique(self.call[known])
        operator_of_call = np.full(len(self.trace.calls), UNKNOWN, np.int64)
        operator_of_call[calls] = self._operators_of(calls)
        found = np.full(len(self.call), UNKNOWN, np.int64)
        found[known] = operator_of_call[self.call[known]]
        return found

    def _operators_of(self, calls: Ints) -> Ints:
        table, operators = self.trace.calls, self.trace.operators
        order = np.lexsort((operators.start, operators.external))
        found = _look_up(operators.external, order, table.external[calls])
        # A call names the operator it came from; where it does not, the operator around it in time is meant.
        rest = np.flatnonzero(found < 0)
        if len(rest):
            found[rest] = self.nesting.around(table.thread[calls[rest]], table.start[calls[rest]])
        return found


def _look_up(keys: Ints, order: Ints, wanted: Ints) -> Ints:
    """The first row in `order` with each wanted key; UNKNOWN where there is none. Keys of 0 and below name nothing."""
    if not len(keys):
        return np.full(len(wanted), UNKNOWN, np.int64)
    ordered = keys[order]
    place = np.minimum(np.searchsorted(ordered, wanted, side="left"), len(ordered) - 1)
    return np.where((ordered[place] == wanted) & (wanted > 0), order[place], UNKNOWN)
