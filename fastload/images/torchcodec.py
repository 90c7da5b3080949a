"""TorchCodec, where it is installed: images are decoded by its version 0.16 and later."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import __version__ as torch_version

__all__ = ["OLDEST", "image_decoders", "why_no_torchcodec"]

OLDEST = "0.16"


@functools.cache
def why_no_torchcodec() -> str | None:
    """None where its image decoders can be imported; else the reason and the remedy. Asked once a process."""
    try:
        found = importlib.import_module("torchcodec")
        decoders = importlib.import_module("torchcodec.decoders")
    except ImportError as error:
        return f"TorchCodec is missing: pip install torchcodec ({error})"
    except (OSError, RuntimeError) as error:  # its libraries are of another build than torch
        why = error.__cause__ or error
        return f"TorchCodec does not load: {why}. Install the build for torch {torch_version}"
    if not hasattr(decoders, "decode_jpeg"):
        version = getattr(found, "__version__", "an old version")
        return f"TorchCodec {version} decodes no images: pip install 'torchcodec>={OLDEST}'"
    return None


def image_decoders() -> Any:
    """The module with decode_jpeg, decode_avif, ...

    Raises:
        ImportError: there is none, with the reason and the remedy.
    """
    why = why_no_torchcodec()
    if why is not None:
        raise ImportError(why)
    return importlib.import_module("torchcodec.decoders")
