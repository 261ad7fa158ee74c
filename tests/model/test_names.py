"""Names that no library has are refused without torch; names that one has never are."""

from __future__ import annotations
