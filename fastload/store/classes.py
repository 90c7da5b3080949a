"""Which folders are classes: torchvision's rule, and a list of classes that the user gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastload.errors import ArgumentError, NotFoundError
from fastload.store.listing import IMAGE_EXTENSIONS

if TYPE_CHECKING:
    from fastload.store.manifest import Manifest

__all__ = ["check_classes"]

_NAMED = 10  # of the names that an error is about


def check_classes(manifest: Manifest, url: str, classes: Sequence[str] | None, allow_empty: bool) -> None:
    """Compare the folders of a manifest with the classes that are wanted.

    Args:
        classes: None: every folder is a class.
        allow_empty: a class may be without images.

    Raises:
        ArgumentError: a folder is not among `classes`.
        NotFoundError: a class has no image.
    """
    folders = manifest.classes or []
    others = sorted(set(folders) - set(classes)) if classes is not None else []
    if others:
        raise ArgumentError(
            f"{url!r}: classes= does not name the folders {_named(others)}. Add them to classes=, or move "
            "them out of url"
        )
    assert manifest.labels is not None
    full = {folders[label] for label in np.unique(manifest.labels).tolist()}
    empty = [name for name in (folders if classes is None else classes) if name not in full]
    if empty and not allow_empty:
        raise NotFoundError(
            f"{url!r}: no valid image for the classes {_named(empty)}. Supported extensions: "
            f"{', '.join(IMAGE_EXTENSIONS)}. Add images, remove the folders, or keep these as classes "
            "without samples: allow_empty=True",
            stage="list",
        )


def _named(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(map(repr, shown[:_NAMED])) + (", ..." if len(shown) > _NAMED else "")
