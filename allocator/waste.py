"""Where the slots of a pool are: the one definition of every kind of fragmentation.

A slot is room for one token's K and V in one row (a layer, or one lane of it). At any moment each slot of a pool is in
exactly one of six places, so that the six add up to the pool::

    pool = live + internal + reservation + imbalance + external + free

live         holds a token that its own row still needs.
internal     inside an allocated unit, and no token will come to it: the rest of a last page, a size rounded up to a
             power of two, a batch padded to its longest sequence, layers added to make groups equal.
reservation  set aside for tokens of a running sequence that do not exist yet, or that never will.
imbalance    its token was dropped by its own row, or its page is free, but it cannot be used because it is tied to a
             row that is longer: one table for several layers, one pool for each layer.
external     free, but useless to the next request although there is enough in sum: no hole is large enough, or the
             free room belongs to another kind of layer. Zero when no request waits.
free         the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Waste"]


@dataclass(frozen=True, slots=True)
class Waste:
    """The slots of a pool at one moment, by the definitions of this module. All in slots.

    Example:
        >>> waste = Waste(pool=100, live=60, internal=10, reservation=5, imbalance=15)
        >>> waste.held, waste.free, waste.live_share
        (90, 10, 0.6)
    """

    pool: int
    live: int
    internal: int = 0
    reservation: int = 0
    imbalance: int = 0
    external: int = 0

    @property
    def held(self) -> int:
        """Slots that no other sequence can have: live + internal + reservation + imbalance."""
        return self.live + self.internal + self.reservation + self.imbalance

    @property
    def free(self) -> int:
        """Slots that the next request can have: pool - held - external."""
        return self.pool - self.held - self.external

    @property
    def live_share(self) -> float:
        """Utilisation of the pool: live / pool."""
        return self.live / self.pool

    @property
    def held_share(self) -> float:
        """What a gauge that counts blocks would report: held / pool."""
        return self.held / self.pool

    def check(self) -> None:
        """Raises ValueError if a place holds less than nothing."""
        for name in ("live", "internal", "reservation", "imbalance", "external", "free"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)} slots: {self}")
