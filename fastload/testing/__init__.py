"""What a dataset, sampler, transform or store of yours must keep, as test classes to subclass.

from fastload.testing import DatasetTests

A subclass defines `make`, and pytest collects one test per promise. pytest is not imported here.
"""

from __future__ import annotations

from fastload.testing.dataset_tests import DatasetTests, IterableDatasetTests
from fastload.testing.sampler_tests import SamplerTests
from fastload.testing.store_tests import StoreTests
from fastload.testing.transform_tests import TransformTests

__all__ = ["DatasetTests", "IterableDatasetTests", "SamplerTests", "StoreTests", "TransformTests"]
