"""Which folders are classes: torchvision's rule, and a list of classes that the user gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from fastload.errors import ArgumentError, NotFoundError
from fastload.store.listing import IMAGE_EXTENSIONS

__all__ = ["check_classes"]

_NAMED = 10  # of the names that an error is about


def check_classes(
    url: str,
    folders: Sequence[str],
    labels: npt.NDArray[np.int64],
    classes: Sequence[str] | None,
    allow_empty: bool,
) -> None:
    """Compare the folders that were listed with the classes that are wanted.

    Args:
        folders: the names of the folders.
        labels: int64, shape (n,), the folder of each image, as an index into `folders`.
        classes: None: every folder is a class.
        allow_empty: a class may be without images.

    Raises:
        ArgumentError: a folder is not among `classes`.
        NotFoundError: a class has no image.
    """
    others = sorted(set(folders) - set(classes)) if classes is not None else []
    if others:
        raise ArgumentError(
            f"{url!r}: classes= does not name the folders {_named(others)}. Add them to classes=, or move "
            "them out of url"
        )
    full = {folders[label] for label in np.unique(labels).tolist()}
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
