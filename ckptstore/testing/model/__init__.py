"""Does the commit protocol keep its promises in every interleaving, within bounds?

An executable specification of the protocol, written from the protocol and not from the code: two writers that crash,
restart and linger as zombies, an operator, a collector, a reader, and a store that loses answers, delays, refuses and
doubles publishes. Every state within a profile's bounds is visited breadth first and checked, so a violation comes with
the shortest way to it. `BUGS` are rules broken on purpose, each of which a search must find.

    python -m ckptstore.testing.model --profile takeover

Not modelled: damage, several ranks, migration, index objects, stale reads (NFS), single-writer mode, what a power cut
leaves of one verb, and the passing of time: the grace of a deletion may end at once.
"""

from __future__ import annotations

from ckptstore.testing.model.invariants import CHECKED
from ckptstore.testing.model.profiles import BUGS, PROFILES, Bug, must_fire
from ckptstore.testing.model.search import Found, Report, explore
from ckptstore.testing.model.world import Profile

__all__ = ["BUGS", "CHECKED", "PROFILES", "Bug", "Found", "Profile", "Report", "explore", "must_fire"]
