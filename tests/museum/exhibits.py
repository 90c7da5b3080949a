"""The thirty exhibits: what happened elsewhere, the fault here, and the run with and without it.

`first` is known from the fault: it was worked out by hand, and `test_museum.py` compares it with what the
trainer was handed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fastload
from tests.museum import orders, samples
from tests.museum.loaders import (
    broken,
    from_files,
    in_batches_of,
    in_order_of,
    of_images,
    of_mixture,
    pair,
    sampled,
    two_views,
)
from tests.museum.training import Plan, Stop


@dataclass(frozen=True)
class Exhibit:
    """A bug.

    Attributes:
        name: of the bug.
        links: where it happened: repository#number.
        happened: what, in one sentence.
        fault: what stands in for it here.
        healthy, faulty: the two runs.
        first: (epoch, step) of the first wrong data.
        rank: whose they are; None: not one rank's.
    """

    name: str
    links: tuple[str, ...]
    happened: str
    fault: str
    healthy: Plan
    faulty: Plan
    first: tuple[int, int]
    rank: int | None = 0


def _set_weights(loader: Any, epoch: int, step: int) -> None:
    if (epoch, step) == (0, 1):
        loader.dataset.weights = {"web": 0.9, "own": 0.1}


def _tell_epoch(loader: Any, epoch: int) -> None:
    loader.sampler.set_epoch(epoch)


MID = (Stop(0, 3),)
SECOND = (Stop(1, 2),)
FORK = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}

EXHIBITS = [
    # --- resumes
    Exhibit(
        "The second resume starts at zero",
        ("huggingface/datasets#8308", "huggingface/datasets#8295", "pytorch/torchtitan#3907"),
        "After a resume the position was counted in one object and saved from another, which stayed at zero.",
        "a sampler that saves position 0 once it was resumed; two resumes",
        **sampled(orders.SecondResumeAtZero, stops=(Stop(0, 2), Stop(0, 4))),
        first=(0, 4),
    ),
    Exhibit(
        "The skipped batches are those of another permutation",
        ("wyim-pgl/transgenic#59", "huggingface/accelerate#4233"),
        "The checkpoint had the generator as it was after the permutation was drawn, so a resume drew the "
        "next one and skipped its first batches.",
        "a sampler whose resume draws the next permutation",
        **sampled(orders.OtherPermutation, stops=MID),
        first=(0, 3),
    ),
    Exhibit(
        "A resumed epoch is in the order of epoch 0",
        ("huggingface/accelerate#2016", "huggingface/accelerate#4071", "modelscope/ms-swift#10050"),
        "The loader that was made for the rest of the epoch began to count epochs at 0.",
        "a sampler that takes up the position but not the epoch; resume in epoch 1",
        **sampled(orders.FirstEpochsOrder, stops=SECOND),
        first=(1, 2),
    ),
    Exhibit(
        "Epochs are shorter after a resume",
        ("huggingface/datasets#7447", "huggingface/accelerate#1451"),
        "What a resumed epoch passed over was passed over in all later epochs too.",
        "a sampler that begins each later epoch where it was resumed",
        **sampled(orders.SkippedInEachEpoch, stops=MID),
        first=(1, 0),
    ),
    Exhibit(
        "A resume between two epochs loses one of them",
        ("verl-project/verl#7401", "meta-pytorch/data#1437"),
        "A state from the end of an epoch was taken for that of an epoch with nothing left, and the next "
        "epoch had no batch.",
        "a sampler that reads the finished epoch to its end once more; resume between epochs 0 and 1 of 3",
        **sampled(orders.EpochLost, stops=(Stop(1, 0),), epochs=3),
        first=(1, 0),
    ),
    Exhibit(
        "The shuffle buffer is lost at a resume",
        ("huggingface/datasets#8408", "huggingface/datasets#7901"),
        "The state had the position in the source, but not the examples that waited in the buffer.",
        "a shuffle buffer of 8 samples that is empty after a resume",
        **sampled(orders.BufferLost, orders.Buffered, stops=MID),
        first=(0, 3),
    ),
    Exhibit(
        "Samples are seen twice at a resume",
        ("huggingface/datasets#8408", "huggingface/datasets#7901"),
        "A resume went back to the beginning of a chunk, and rows already returned came again.",
        "a sampler that goes back to the begin of its chunk of 10 samples",
        **sampled(orders.Rewound, stops=MID),
        first=(0, 3),
    ),
    Exhibit(
        "Batches made ahead are lost at a checkpoint",
        ("lhotse-speech/lhotse#417", "huggingface/datasets#8145"),
        "The sampler was saved as far as workers had drawn from it, ahead of what the training had seen.",
        "a sampler that saves a position two batches ahead",
        **sampled(orders.CountsDrawn, stops=MID),
        first=(0, 3),
    ),
    # --- ranks
    Exhibit(
        "A resume with more ranks skips too much",
        ("huggingface/transformers#40245", "huggingface/accelerate#3757"),
        "The position was a number of batches, and each rank of the new run skipped as many.",
        "a sampler that counts steps; resume with 2 ranks instead of 1",
        **sampled(orders.StepsOfOneRank, stops=(Stop(0, 2, ranks=2),)),
        first=(0, 2),
        rank=None,
    ),
    Exhibit(
        "A process does not find its rank",
        ("k2-fsa/icefall#1616",),
        "On one cluster the sampler did not detect its rank, and all GPUs got the same batches.",
        "a sampler of 2 ranks that takes rank 0's part after a resume",
        **sampled(orders.RankForgotten, ranks=2, stops=(Stop(0, 1),)),
        first=(0, 1),
        rank=1,
    ),
    Exhibit(
        "Every rank draws the same samples",
        ("pixeli99/SVD_Xtend#75", "alex-hh/profam#523"),
        "Samples were drawn at random, with the same seed in each process.",
        "a sampler of 2 ranks that draws with one seed",
        **sampled(orders.SameDraws, orders.Draws, ranks=2),
        first=(0, 0),
        rank=1,
    ),
    Exhibit(
        "One rank has more batches than the others",
        ("NVIDIA-NeMo/Megatron-Bridge#5944",),
        "Ten rows for three ranks became 4, 3 and 3; each rank cut its own end, and rank 0 had a batch more.",
        "the same numbers: batches of 2 from 10 samples on 3 ranks",
        **sampled(orders.Uneven, orders.Even, ranks=3, batch_size=2, drop_last=True),
        first=(0, 1),
        rank=0,
    ),
    Exhibit(
        "All ranks but the first miss small chunks",
        ("huggingface/datasets#8079",),
        "Each rank took every n-th row of each chunk, and of a chunk of one row only rank 0 found one.",
        "a sampler of 2 ranks, which gives nothing to rank 1 from step 2 on",
        **sampled(orders.SmallChunks, ranks=2),
        first=(0, 2),
        rank=1,
    ),
    Exhibit(
        "The padding repeats the wrong sample",
        ("NVIDIA/DALI#1557",),
        "The copies that fill up the last batch of a shard were made of the wrong sample.",
        "a sampler of 2 ranks that pads 21 samples with the last one instead of the first",
        **sampled(orders.PaddedWithLast, orders.Padded, ranks=2),
        first=(0, 2),
        rank=1,
    ),
    # --- epochs and shards
    Exhibit(
        "Nobody calls set_epoch",
        ("facebookresearch/ClassyVision#118", "lucidrains/DALLE-pytorch#230"),
        "The sampler was not told the epoch, and shuffled each one alike.",
        "torch's DistributedSampler without the call",
        **pair(Plan(in_order_of(orders.TorchsOrder), before_epoch=_tell_epoch), before_epoch=None),
        first=(1, 0),
    ),
    Exhibit(
        "A shard is read past its end",
        ("NVIDIA/DALI#167",),
        "A reader looked for the end of all shards instead of its own, and went on in the next rank's.",
        "two ranks with a shard each, whose readers go on to the last record of all",
        **sampled(orders.PastTheEnd, orders.Shards, ranks=2),
        first=(1, 0),
        rank=0,
    ),
    Exhibit(
        "Each epoch begins one sample later",
        ("NVIDIA/DALI#1762",),
        "From the third epoch on, the data of a shard were shifted by one sample in each epoch.",
        "a reader of shards that is one record off from epoch 2 on",
        **sampled(orders.OneFurther, orders.Shards, epochs=3),
        first=(2, 0),
    ),
    # --- batches
    Exhibit(
        "The last batch is dropped in the middle",
        ("huggingface/datasets#7441",),
        "Each of several workers dropped the last batch of its own part.",
        "22 samples in two halves, each of which is cut to whole batches",
        **pair(
            Plan(in_batches_of(orders.Batches, length=22)),
            loader=in_batches_of(orders.CutByWorkers, length=22),
        ),
        first=(0, 2),
    ),
    Exhibit(
        "The order depends on the number of workers",
        ("dmlc/dgl#5068",),
        "Each worker had a range of the samples, and the batches of the workers came in turn.",
        "the batches of two halves, in turn",
        **pair(Plan(in_batches_of(orders.Batches)), loader=in_batches_of(orders.StripedByWorkers)),
        first=(0, 1),
    ),
    Exhibit(
        "Some batches come twice, and others never",
        ("kohya-ss/musubi-tuner#283",),
        "With persistent workers some batches of an epoch were duplicated, while others were dropped.",
        "from epoch 1 on, two workers draw from lists of batches that each has shuffled for itself",
        **pair(Plan(in_batches_of(orders.Batches)), loader=in_batches_of(orders.EachWorkerItsOwn)),
        first=(1, 0),
    ),
    # --- mixtures
    Exhibit(
        "The weights of a mixture are forgotten at a resume",
        ("KempnerInstitute/KempnerForge#51",),
        "The checkpoint lacked the loader, and with it the weights that had been changed during the run.",
        "a Mixture whose weights are set after step 1, and are the old ones after a resume",
        **pair(
            Plan(of_mixture(fastload.MixtureSampler), epochs=1, stops=(Stop(0, 5),), after_step=_set_weights),
            loader=of_mixture(samples.WeightsForgotten),
        ),
        first=(0, 5),
    ),
    Exhibit(
        "A source loses and repeats samples when weights change",
        ("NVIDIA/Megatron-LM#457",),
        "After a resume with other weights, the position in each source was that of a run with these weights "
        "from its start.",
        "a Mixture that is resumed with other weights and counts its sources by these",
        **pair(
            Plan(
                of_mixture(fastload.MixtureSampler, {"web": 0.75, "own": 0.25}), epochs=1, stops=(Stop(0, 5),)
            ),
            loader=of_mixture(samples.CountedAnew, {"web": 0.75, "own": 0.25}),
        ),
        first=(0, 5),
    ),
    # --- samples
    Exhibit(
        "A bad sample is replaced in silence",
        ("facebookresearch/jepa#64", "XPixelGroup/BasicSR#646"),
        "The dataset drew another index at random in place of one that it could not read.",
        'a dataset that does so, beside one with on_error="replace"',
        **pair(
            Plan(broken(samples.Broken, "replace"), epochs=1),
            loader=broken(samples.AnotherInstead, "raise"),
        ),
        first=(0, 4),
    ),
    Exhibit(
        "Another machine lists the files in another order",
        ("pytorch/vision#192", "ByteDance-Seed/VeOmni#330"),
        "The files were taken in the order in which the file system listed them.",
        "an ObjectDataset two of whose keys change places",
        **pair(
            Plan(from_files(samples.write_objects, samples.as_listed), epochs=1),
            loader=from_files(samples.write_objects, samples.as_another_disk_lists),
        ),
        first=(0, 3),
    ),
    Exhibit(
        "A cache gives the object of another key",
        ("webdataset/webdataset#471", "seisbench/seisbench#80"),
        "The name of a cached file was the last part of its URL, and the shards of that name in other "
        "directories were read from it.",
        "an ObjectDataset that reads the first object of each name",
        **pair(
            Plan(from_files(samples.write_objects, samples.as_listed), epochs=1),
            loader=from_files(samples.write_objects, samples.cached_by_last_name),
        ),
        first=(0, 0),
    ),
    Exhibit(
        "A cache gives an old version",
        ("Mozilla-Data-Collective/datacollective-python#113",),
        "Downloads were kept by their file names, and a new version of a dataset has the same names.",
        "tar shards of which the second is read as it was before it was written again",
        **pair(
            Plan(from_files(samples.write_shards_again, samples.shards), epochs=1),
            loader=from_files(samples.write_shards, samples.shards),
        ),
        first=(0, 0),
    ),
    Exhibit(
        "Labels come from an old file",
        ("ultralytics/yolov5#306", "ultralytics/ultralytics#25662"),
        "Labels were kept in a file of their own, which was not read again when they had been corrected.",
        "a TableDataset with the labels of an older table",
        **pair(
            Plan(from_files(samples.write_objects, samples.labelled), epochs=1),
            loader=from_files(samples.write_objects, samples.labelled_before),
        ),
        first=(0, 2),
    ),
    # --- random numbers
    Exhibit(
        "The augmentation of epoch 0 comes in each epoch",
        ("starVLA/starVLA#470", "Lightning-AI/pytorch-lightning#20412", "xingyizhou/CenterNet#233"),
        "Workers that live on did not hear of a new epoch, and drew the same random numbers again.",
        "a persistent worker that is told the first epoch only",
        **pair(Plan(of_images()), loader=of_images(**FORK), setting=samples.first_epoch_for_ever),
        first=(1, 0),
    ),
    Exhibit(
        "The augmentation starts again at a resume",
        ("fangchangma/sparse-to-dense.pytorch#19",),
        "Workers were seeded by their number alone, so a resumed run drew the first random numbers again.",
        "random numbers of epoch 0 after a resume in epoch 1",
        **pair(Plan(of_images(), stops=SECOND), setting=samples.seeds_from_the_start),
        first=(1, 2),
    ),
    Exhibit(
        "Two views get the same random numbers",
        ("kvablack/dlimp#5",),
        "Each augmentation of a list got the same seed, so that all of them were correlated.",
        "a StackDataset of two crops of an image, the second with the random numbers of the first",
        **pair(Plan(two_views, epochs=1), setting=samples.one_seed_for_both_views),
        first=(0, 0),
    ),
]
