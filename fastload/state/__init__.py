"""Where a loader is in its data, as a small dict; how the same order is made again."""

from fastload.state.generators import kept_globals
from fastload.state.progress import Progress, dataset_state, load_dataset, resume_fetcher
from fastload.state.state import LoaderState

__all__ = ["LoaderState", "Progress", "dataset_state", "kept_globals", "load_dataset", "resume_fetcher"]
