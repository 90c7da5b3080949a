"""The packs at a URL: which records are published there."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from fastload.cache.cache import Cache
from fastload.cache.listings import latest
from fastload.cache.pack import MOST_TAIL, Pack, is_pack_name, tail_size
from fastload.errors import CacheError, NotFoundError, ObjectChangedError
from fastload.store import ObjectInfo, Store
from fastload.store.files import is_part

__all__ = ["REQUESTS", "Published", "sources_of"]

REQUESTS = 8  # in flight


class Published:
    """What is published at a URL, as of the last `refresh`.

    Args:
        store: the URL, opened.
        settled: names of packs whose index is not read.

    Attributes:
        names: of all packs.
        store: the URL, opened.
        packs: name -> index, in the order of names.
        damaged: name -> what is wrong with an object that is named like a pack.
        foreign: names of other objects.
    """

    def __init__(self, store: Store, settled: Iterable[str] = ()) -> None:
        self.store = store
        self._settled = frozenset(settled)
        self.names: list[str] = []
        self.packs: dict[str, Pack] = {}
        self.damaged: dict[str, str] = {}
        self.foreign: list[str] = []

    def refresh(self) -> list[Pack]:
        """List the URL, and read the index of each pack that was not there before: these packs.

        Raises:
            NotFoundError: there is no such directory or bucket.
            StoreError: the store failed.
        """
        packs: list[ObjectInfo] = []
        foreign: list[str] = []
        for page in self.store.list():
            for info in page:
                if is_pack_name(info.key):
                    packs.append(info)
                elif not is_part(info.key):  # in a directory: a pack on its way
                    foreign.append(info.key)
        self.foreign, self.names = sorted(foreign), [info.key for info in packs]
        known = self._settled | self.packs.keys() | self.damaged.keys()
        new = [info for info in packs if info.key not in known]
        with ThreadPoolExecutor(REQUESTS, "fastload-packs") as pool:
            found = [pack for pack in pool.map(self._read, sorted(new)) if pack is not None]
        self.packs |= {pack.name: pack for pack in found}
        return found

    def _read(self, info: ObjectInfo) -> Pack | None:
        size = tail_size(info.key)
        try:
            if size > MOST_TAIL:
                raise CacheError(
                    f"promises an index of {size:,} bytes, and at most {MOST_TAIL:,} are read", key=info.key
                )
            if size > info.size:
                raise CacheError("is cut: it is shorter than its name tells", key=info.key)
            tail = self.store.read_range(info.key, info.size - size, info.size, info.version)
            return Pack(info.key, info.version, info.size, tail)
        except CacheError as error:
            self.damaged[info.key] = error.message
        except (NotFoundError, ObjectChangedError):  # deleted or written again meanwhile
            pass
        return None

    def refuse_foreign(self) -> None:
        """Refuse a URL at which other objects are.

        Raises:
            CacheError: names the first of them.
        """
        if self.foreign:
            raise CacheError(
                f"{self.store.url} holds objects that are no packs of a cache: give a prefix of its own",
                key=self.foreign[0],
            )

    def refuse_others(self, sources: frozenset[str]) -> None:
        """Refuse a URL that is not for records of these sources; see `sources_of`.

        A pack or a cache whose sources are not known passes: its keys tell its records apart anyway.

        Raises:
            CacheError: packs of other data are there.
        """
        for pack in self.packs.values():
            if sources and pack.sources and not sources & pack.sources:
                raise CacheError(
                    f"{self.store.url} holds records of {_named(pack.sources)}, and this cache is of "
                    f"{_named(sources)}: give a prefix of its own",
                    key=pack.name,
                )


def sources_of(cache: Cache) -> frozenset[str]:
    """The identities of the places that the datasets of this cache list."""
    folder = cache.manifests
    if folder is None or not folder.is_dir():
        return frozenset()
    return frozenset(manifest.identity for manifest in latest(folder))


def _named(sources: frozenset[str]) -> str:
    return ", ".join(repr(source) for source in sorted(sources))
