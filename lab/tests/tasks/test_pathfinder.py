"""Pathfinder: labels by flood fill, no way round the path, splits, cache, data of others, bad input."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernelformer_lab.tasks import make_task, pathfinder
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.tasks.pathfinder import Drawings, Rules, generate
from sampling import SIGMAS

SMALL = {"size": 16, "dashes": 5, "distractors": 1, "distractor_dashes": 2, "marker_radius": 1.25}
SMALL_RULES = Rules(16, 16, dashes=5, distractors=1, distractor_dashes=2, marker_radius=1.25)
TINY = {"train_samples": 150, "validation_samples": 30, "test_samples": 20, **SMALL}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture(scope="module")
def large():
    return generate(400, seed=1)


@pytest.fixture(scope="module")
def small():
    return generate(3000, rules=SMALL_RULES)


def parts(points, reach):
    """Sets of pixels that are joined by steps of at most ``reach``: a plain flood fill."""
    left, found = set(points), []
    far = int(reach)
    near = [(i, j) for i in range(-far, far + 1) for j in range(-far, far + 1) if i * i + j * j <= reach * reach]
    while left:
        edge = [left.pop()]
        part = set(edge)
        while edge:
            r, c = edge.pop()
            new = {(r + i, c + j) for i, j in near} & left
            left -= new
            part |= new
            edge += new
        found.append(part)
    return found


def pixels(image, least=1):
    return [(int(r), int(c)) for r, c in np.argwhere(image >= least)]


def marker_middles(image):
    found = parts(pixels(image, 255), 1.5)
    assert len(found) == 2
    return [np.mean(sorted(x), 0) for x in found]


def check(made, rules):
    """Markers are two; paths are so many; the marked ones are one path or two, as the label says."""
    for image, label in zip(made.images, made.labels.tolist(), strict=True):
        markers = parts(pixels(image, 255), 1.5)
        paths = parts(pixels(image), rules.reach)
        assert len(markers) == 2
        assert len(paths) == 2 + rules.distractors
        marked = [[i for i, path in enumerate(paths) if path & marker] for marker in markers]
        assert (marked[0] == marked[1]) == bool(label), image
    assert set(made.labels.tolist()) == {0, 1}


def test_labels_are_what_a_flood_fill_finds_and_different_paths_are_never_joined(large):
    check(large, Rules())


@pytest.mark.parametrize(
    ("count", "rules"),
    [
        (500, SMALL_RULES),
        (200, Rules(dashes=9, distractors=6, distractor_dashes=3)),
        (200, Rules(rows=24, columns=40, dashes=6, distractors=3, distractor_dashes=2, gap=0.0, bend=0.5)),
        (100, Rules(rows=48, columns=48, dashes=6, dash_length=4.0, gap=2.3, marker_radius=2.5, contrast=0.3)),
        (200, Rules(rows=21, columns=17, dashes=5, distractors=0, dash_length=1.0, gap=1.5, contrast=0.9)),
    ],
)
def test_labels_are_right_with_other_options(count, rules):
    made = generate(count, rules=rules)
    assert made.images.shape == (count, rules.rows, rules.columns)
    check(made, rules)


def test_the_flood_fill_can_tell_that_a_path_is_torn(large):
    for image in large.images[large.labels == 1][:50]:
        first, second = parts(pixels(image, 255), 1.5)
        away = np.hypot(*(np.indices(image.shape) - np.mean(sorted(first), 0)[:, None, None]))
        torn = np.where((away > 4) & (away < 4 + 2 * Rules().reach), 0, image)
        assert not any(path & first and path & second for path in parts(pixels(torn), Rules().reach))


def test_images_have_grey_dashes_and_white_discs(large):
    assert large.images.dtype == large.labels.dtype == np.uint8
    assert set(np.unique(large.images)) <= set(range(0, 256, 17))
    dashes = large.images[large.images < 255]
    assert dashes.max() >= 0.75 * 255
    lit = (large.images > 0).mean()
    assert 0.15 < lit < 0.35
    white = (large.images == 255).sum((1, 2))
    assert white.min() >= 4
    assert white.max() <= 18


@pytest.fixture(scope="module")
def looks(small):
    """Per image: ink, pixels with ink, distance of the markers, row and column of their middle, how far off it is."""
    rows = []
    for image in small.images:
        a, b = marker_middles(image)
        middle, centre = (a + b) / 2, np.array(image.shape) / 2 - 0.5
        rows.append([image.sum(), (image > 0).sum(), math.dist(a, b), *middle, math.dist(middle, centre)])
    return np.array(rows, float)


def accuracy_by_bins(values, labels, bins=10):
    """Of the likelier class in each bin, learned on one half and tried on the other."""
    half = len(values) // 2
    bin_of = np.digitize(values, np.quantile(values[:half], np.arange(1, bins) / bins))
    signs = labels[:half] * 2.0 - 1
    likelier = np.bincount(bin_of[:half], signs, minlength=bins) > 0
    return float((likelier[bin_of[half:]] == labels[half:]).mean())


def accuracy_of_a_linear_model(inputs, labels):
    """Ridge regression on two thirds, accuracy on the others."""
    train = len(inputs) * 2 // 3
    x = np.concatenate([inputs, np.ones((len(inputs), 1))], 1)
    y = labels * 2.0 - 1
    gram = x[:train].T @ x[:train] + 10 * np.eye(x.shape[1])
    weights = np.linalg.solve(gram, x[:train].T @ y[:train])
    return float(((x[train:] @ weights > 0) == (y[train:] > 0)).mean())


def test_classes_are_balanced_and_have_the_same_ink_and_marker_distance(small, looks):
    count, ones = len(small.labels), int(small.labels.sum())
    assert abs(ones - count / 2) <= SIGMAS * math.sqrt(count) / 2
    one, two = looks[small.labels == 1], looks[small.labels == 0]
    error = np.sqrt(one.var(0) / len(one) + two.var(0) / len(two))
    difference = np.abs(one.mean(0) - two.mean(0))
    assert (difference[:-1] <= SIGMAS * error[:-1]).all(), (one.mean(0), two.mean(0))


def test_there_is_no_short_cut_by_ink_markers_or_single_pixels(small, looks):
    # Where the markers are does tell something: a path keeps away from the other and from the border.
    error = SIGMAS * 0.5 / math.sqrt(len(small.labels) / 3)
    flat = small.images.reshape(len(small.images), -1) / 255
    for values in looks.T:
        assert accuracy_by_bins(values, small.labels) <= 0.55 + error
    for inputs in (flat, flat == 1, (looks - looks.mean(0)) / looks.std(0)):
        assert accuracy_of_a_linear_model(inputs, small.labels) <= 0.55 + error
    # With the answer in a corner they find it.
    told = flat.copy()
    told[:, 0] = small.labels
    assert accuracy_of_a_linear_model(told, small.labels) > 0.95
    assert accuracy_by_bins(looks[:, 0] / 1e6 + small.labels, small.labels) > 0.85


def test_a_seed_means_the_same_images_and_fewer_are_the_first_of_more(small):
    some, other = generate(300, rules=SMALL_RULES), generate(300, rules=SMALL_RULES, seed=1)
    assert np.array_equal(some.images, small.images[:300])
    assert np.array_equal(some.labels, small.labels[:300])
    assert not np.array_equal(some.images, other.images)
    assert len({x.tobytes() for x in small.images}) == 3000


def test_images_that_were_seen_are_left_out(small):
    seen = set()
    first = pathfinder._unseen(Drawings(small.images[:20], small.labels[:20]), seen, 15)
    again = pathfinder._unseen(Drawings(small.images[5:30], small.labels[5:30]), seen, 100)
    assert np.array_equal(first.images, small.images[:15])
    assert np.array_equal(again.images, small.images[15:30])
    assert np.array_equal(again.labels, small.labels[15:30])


def test_paths_for_which_there_is_no_room_are_reported(monkeypatch):
    monkeypatch.setattr(pathfinder, "_PATIENCE", 1000)
    with pytest.raises(ValueError, match=r"found only 0 of 5 different images.*dashes=40.*give a larger size"):
        generate(5, rules=Rules(rows=16, columns=16, dashes=40))


def test_splits_have_their_sizes_share_nothing_and_the_test_stays():
    task, other = make_task("pathfinder", **TINY), make_task("pathfinder", **TINY | {"train_samples": 60})
    sizes = {name: len(task.split(name)) for name in ("train", "validation", "test")}
    assert sizes == {"train": 150, "validation": 30, "test": 20}
    images = [x["pixels"].numpy().tobytes() for name in sizes for x in task.split(name)]
    assert len(set(images)) == 200
    for name, count in [("test", 20), ("validation", 30), ("train", 60)]:
        for i in range(count):
            mine, its = task.split(name)[i], other.split(name)[i]
            assert torch.equal(mine["pixels"], its["pixels"])
            assert mine["labels"] == its["labels"]
    with pytest.raises(IndexError):
        task.split("test")[20]


def test_a_batch_is_pixels_row_by_row_without_a_mask():
    task = make_task("pathfinder", **TINY | {"size": [18, 16]})
    made = generate(20, rules=replace(SMALL_RULES, rows=18))
    data = task.split("test")
    loader = torch.utils.data.DataLoader(data, batch_size=8, collate_fn=task.collate)
    batches = list(loader)
    assert [set(x) for x in batches] == [{"input_ids", "labels"}] * 3
    ids, labels = (torch.cat([x[name] for x in batches]) for name in ("input_ids", "labels"))
    assert ids.dtype == labels.dtype == torch.int64
    assert np.array_equal(ids.numpy(), made.images.reshape(20, 288))
    assert np.array_equal(labels.numpy(), made.labels)


def test_settings_need_no_images():
    want = {"vocab_size": 256, "max_position_embeddings": 1024, "num_labels": 2, "pad_token_id": None}
    assert make_task("pathfinder").settings() == want
    assert make_task("pathfinder", size=[16, 20]).settings()["max_position_embeddings"] == 320


@pytest.mark.parametrize(("dashes", "distractors", "each"), [(14, 5, 4), (9, 6, 3), (6, 10, 2), (4, 20, 1)])
def test_distractors_follow_the_paths_as_in_long_range_arena(dashes, distractors, each):
    rules = make_task("pathfinder", dashes=dashes).rules
    assert (rules.distractors, rules.distractor_dashes) == (distractors, each)
    assert make_task("pathfinder").rules == Rules()


def test_made_images_are_kept_and_used_again(tmp_path, monkeypatch):
    task = make_task("pathfinder", **TINY | {"size": [17, 15], "train_samples": 151})  # an odd number of pixels
    first = torch.stack([x["pixels"] for x in task.split("train")])
    assert task.path.parent == tmp_path / "xdg" / "kernelformer"
    assert [x.name for x in task.path.parent.iterdir()] == [task.path.name]
    assert task.path.stat().st_size < 201 * 255 * 0.6
    before = os.stat(task.path)
    monkeypatch.setattr(pathfinder, "generate", lambda *_, **__: pytest.fail("made again"))
    again = make_task("pathfinder", **TINY | {"size": [17, 15], "train_samples": 151})
    assert torch.equal(torch.stack([x["pixels"] for x in again.split("train")]), first)
    assert [x["labels"] for x in again.split("train")] == [x["labels"] for x in task.split("train")]
    assert os.stat(task.path).st_mtime_ns == before.st_mtime_ns
    for other in ({"seed": 1}, {"bend": 0.9}, {"contrast": 0.5}, {"gap": 1.2}):
        assert make_task("pathfinder", **TINY, **other).path != make_task("pathfinder", **TINY).path


def test_an_integer_means_the_same_as_the_number():
    assert make_task("pathfinder", gap=1, dash_length=2, bend=1).path == make_task("pathfinder").path


def test_a_damaged_cache_file_is_named(tmp_path):
    task = make_task("pathfinder", **TINY, cache=tmp_path)
    task.split("test")
    whole, arrays = task.path.read_bytes(), dict(np.load(task.path))
    named = re.escape(f"the cache file {task.path} cannot be used") + ".*delete it"
    for damaged in (b"", whole[: len(whole) // 2]):
        task.path.write_bytes(damaged)
        with pytest.raises(ValueError, match=named):
            make_task("pathfinder", **TINY, cache=tmp_path).split("test")
    for change, message in [
        ({"labels": arrays["labels"] + 2}, "its labels are not those of 200 images"),
        ({"labels": arrays["labels"][1:]}, "its labels are not those of 200 images"),
        ({"levels": arrays["levels"][1:]}, "its levels are not those of 200 images of 16 x 16"),
        ({"levels": arrays["levels"].astype(np.int64)}, "its levels are not those"),
    ]:
        np.savez(task.path, **arrays | change)
        with pytest.raises(ValueError, match=message):
            make_task("pathfinder", **TINY, cache=tmp_path).split("test")
    other = make_task("pathfinder", **TINY, seed=5, cache=tmp_path)
    other.path.write_bytes(whole)
    with pytest.raises(ValueError, match="made with other options"):
        other.split("test")


def test_a_fingerprint_is_about_the_way_images_are_made(monkeypatch):
    before = make_task("pathfinder").fingerprint()
    assert make_task("pathfinder", **TINY, seed=3).fingerprint() == before
    monkeypatch.setattr(pathfinder, "FORMAT", 2)
    assert make_task("pathfinder").fingerprint() != before


def write_data(folder, count=12, size=(16, 16), **changes):
    rng = np.random.default_rng(0)
    arrays = {"images": rng.integers(0, 256, (count, *size), np.uint8), "labels": np.arange(count) % 2}
    for name in ("train", "validation", "test"):
        np.savez(folder / f"{name}.npz", **{k: v for k, v in (arrays | changes).items() if v is not None})
    return arrays


def test_images_of_others_are_taken_as_they_are(tmp_path):
    arrays = write_data(tmp_path)
    task = make_task("pathfinder", data=str(tmp_path), size=16, test_samples=5)
    batch = task.collate([*task.split("train")])
    assert np.array_equal(batch["input_ids"].numpy(), arrays["images"].reshape(12, 256))
    assert batch["labels"].tolist() == [0, 1] * 6
    assert len(task.split("test")) == 5
    assert task.remarks() == [f"the images are those of {tmp_path}"]
    assert make_task("pathfinder").remarks() == []
    before = task.fingerprint()
    write_data(tmp_path, count=14)
    assert make_task("pathfinder", data=tmp_path, size=16).fingerprint() != before
    assert not (tmp_path / "xdg").exists()


def test_by_default_all_images_of_others_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("kernelformer_lab.tasks.pathfinder.SAMPLES", {"test": 2, "validation": 3, "train": 4})
    write_data(tmp_path)
    task = make_task("pathfinder", data=tmp_path, size=16)
    assert [len(task.split(x)) for x in ("train", "validation", "test")] == [12, 12, 12]
    made = make_task("pathfinder", **{k: v for k, v in TINY.items() if not k.endswith("_samples")})
    assert [len(made.split(x)) for x in ("train", "validation", "test")] == [4, 3, 2]


def test_long_range_arena_has_so_many_images():
    assert make_task("pathfinder").counts == {"test": 20_000, "validation": 20_000, "train": 160_000}


def test_options_of_the_drawing_are_refused_with_data(tmp_path):
    write_data(tmp_path)
    options = {"dashes": 9, "distractors": 2, "distractor_dashes": 4, "dash_length": 3, "gap": 2, "bend": 0.5}
    options |= {"marker_radius": 2, "contrast": 0.5}
    for name, value in options.items():
        with pytest.raises(ValueError, match=rf"nothing is drawn, got {name}={value}; leave out the options of"):
            make_task("pathfinder", data=tmp_path, size=16, **{name: value})
    with pytest.raises(ValueError, match=r"nothing is drawn, got dashes=6, gap=2; leave out"):
        make_task("pathfinder", data=tmp_path, size=16, dashes=6, gap=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": (16, 15)}, r"train.npz must be uint8.*16, 16.*got uint8 \(12, 16, 15\)"),
        ({"labels": None}, "train.npz has no array labels, found images"),
        ({"images": None}, "train.npz has no array images, found labels"),
        ({"labels": np.array([0, 2] * 6)}, "label must be an integer from 0 to 1, got 2"),
        ({"labels": np.zeros(11, int)}, r"one for each of 12 images, got int64 \(11,\)"),
        ({"labels": np.zeros(12)}, "labels of .*train.npz must be integers"),
        ({"images": np.zeros((12, 16, 16))}, r"train.npz must be uint8.*got float64"),
        ({"count": 0}, "train split of .* is empty"),
    ],
)
def test_bad_data_is_named(tmp_path, changes, message):
    write_data(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        make_task("pathfinder", data=tmp_path, size=16).split("train")


def test_missing_data_is_named_and_bad_labels_may_be_left_out(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file or folder .*nowhere"):
        make_task("pathfinder", data=tmp_path / "nowhere")
    write_data(tmp_path, labels=np.array([0, 1, 2] * 4))
    task = make_task("pathfinder", data=tmp_path, size=16, skip_bad=True)
    assert [x["labels"] for x in task.split("test")] == [0, 1] * 4
    assert any("left out 4 of 12" in x for x in task.remarks())
    (tmp_path / "test.npz").unlink()
    with pytest.raises(ValueError, match="has no test split, found train, validation"):
        make_task("pathfinder", data=tmp_path, size=16, skip_bad=True).split("test")


def test_accuracy_is_the_share_of_right_answers():
    assert make_task("pathfinder").score(Outcome(loss=0.7, right=0.75)) == {"accuracy": 0.75}
    task = make_task("pathfinder", **TINY)
    labels = {x: np.array([s["labels"] for s in task.split(x)]) for x in ("train", "test")}
    most = int(labels["train"].mean() > 0.5)
    assert task.baselines("test") == {"most frequent class": {"accuracy": float((labels["test"] == most).mean())}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_samples": 0}, "train_samples must be an integer of at least 1, got 0"),
        ({"dashes": 2, "gap": 0.5}, "longer than its markers: above 6.5 pixels, got 4.5, with dashes=2"),
        ({"dashes": 1}, "dashes must be an integer of at least 2, got 1"),
        ({"distractors": -1}, "distractors must be an integer of at least 0, got -1"),
        ({"distractor_dashes": 0}, "distractor_dashes must be an integer of at least 1, got 0"),
        ({"dash_length": 0.5}, "dash_length must be a finite number of at least 1, got 0.5"),
        ({"gap": -1}, "gap must be a finite number of at least 0, got -1"),
        ({"gap": "wide"}, "gap must be a finite number, got 'wide'"),
        ({"bend": 2.0}, r"bend must be above 0 and at most pi/2 = 1.57, in radians, got 2.0"),
        ({"contrast": 1.0}, "contrast must be above 0 and at most 0.9, to tell markers by, got 1.0"),
        ({"marker_radius": 1}, "marker_radius must be a finite number of at least 1.25, got 1"),
        ({"size": 8}, r"size must be at least 12 x 12 for two paths with marker_radius=1.5, got 8 x 8"),
        ({"size": [32]}, r"size must be an integer or \[rows, columns\], got \[32\]"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"skip_bad": "no"}, "skip_bad must be True or False, got 'no'"),
        ({"dahses": 9}, "unknown option for task 'pathfinder', 'dahses'; did you mean 'dashes'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("pathfinder", **options)
