"""TorchCodec, where it is installed: images are decoded by its version 0.16 and later."""

from __future__ import annotations

import functools
from typing import Any

from torch import __version__ as torch_version


@functools.cache
def why_no_torchcodec() -> str | None:
    """None where its image decoders can be imported; else the reason and the remedy. Asked once a process."""
    try:
        import torchcodec
        import torchcodec.decoders
    except ImportError as error:
        return f"TorchCodec is missing: pip install torchcodec ({error})"
    except (OSError, RuntimeError) as error:  # its libraries are of another build than torch
        why = error.__cause__ or error
        return f"TorchCodec does not load: {why}. Install the build for torch {torch_version}"
    if not hasattr(torchcodec.decoders, "decode_jpeg"):
        return f"TorchCodec {torchcodec.__version__} decodes no images: pip install 'torchcodec>=0.16'"
    return None


def image_decoders() -> Any:
    """The module with decode_jpeg, decode_avif, ...

    Raises:
        ImportError: there is none, with the reason and the remedy.
    """
    why = why_no_torchcodec()
    if why is not None:
        raise ImportError(why)
    from torchcodec import decoders

    return decoders
