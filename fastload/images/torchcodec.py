"""TorchCodec, where it is installed: images are decoded by its version 0.16 and later."""

from __future__ import annotations

import functools
import importlib
from typing import Any

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
        return f"TorchCodec does not load: {error}. Install the build that belongs to this torch"
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
