"""The routers of this process. Serve makes them, one for each handle, and has no way to ask a handle for its own."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unspool.cluster.ray_router import PrefixRouter

# Here and not in ray_router, whose globals Serve copies with the class.
ROUTERS: weakref.WeakSet[PrefixRouter] = weakref.WeakSet()
