"""Images: tokens and values by their definition, augmentation by index, splits, caches, places, bad input."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from kernelformer_lab.data import image_cache as decoding
from kernelformer_lab.data import images as npz
from kernelformer_lab.data.sources import divide
from kernelformer_lab.tasks import make_task
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.training import Run, train
from sampling import SIGMAS

TASKS = ("grey", "images", "pixels")
SMALL = {"size": [4, 6]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def pictures(count, seed=0, shape=(4, 6, 3)):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)


def labels(count):
    return np.arange(count) % 10


def written(folder, **counts):
    """An npz file for each split; other splits have other images."""
    for seed, (split, count) in enumerate(counts.items()):
        np.savez(folder / f"{split}.npz", images=pictures(count, seed), labels=labels(count))
    return folder


def saved(folder, images, names):
    for image, name in zip(images, names, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / name)
    return folder


def batch(task, split="train", indices=None):
    samples = task.split(split)
    return task.collate(samples.__getitems__(range(len(samples)) if indices is None else indices))


def shown(task, split="train"):
    """All images of a split, (N, rows, columns, channels)."""
    return np.stack([x["pixels"].numpy() for x in task.split(split).__getitems__(range(len(task.split(split))))])


def grey_by_definition(images):
    red, green, blue = np.moveaxis(images.astype(np.float64), -1, 0)
    return np.floor((299 * red + 587 * green + 114 * blue) / 1000 + 0.5)


def test_grey_tokens_are_weighted_sums_of_colours_row_by_row(data):
    written(data, train=40, validation=5)
    found = batch(make_task("grey", data=data, **SMALL))
    assert found["input_ids"].dtype == found["labels"].dtype == torch.int64
    assert np.array_equal(found["input_ids"].numpy(), grey_by_definition(pictures(40)).reshape(40, 24))
    assert found["labels"].tolist() == labels(40).tolist()
    assert sorted(found) == ["input_ids", "labels"]  # nothing is padded


def test_white_stays_white_and_the_weights_are_those_of_the_three_colours():
    colours = np.array([[[255, 255, 255]], [[255, 0, 0]], [[0, 255, 0]], [[0, 0, 255]], [[0, 0, 0]]], np.uint8)
    assert decoding.grey(colours).ravel().tolist() == [255, 76, 150, 29, 0]


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1)])
def test_grey_images_are_taken_as_they_are(data, shape):
    images = pictures(20, shape=shape)
    np.savez(data / "train.npz", images=images, labels=labels(20))
    np.savez(data / "test.npz", images=images, labels=labels(20))
    for name in TASKS:
        task = make_task(name, data=data, **SMALL, **({} if name == "grey" else {"channels": 1}))
        assert np.array_equal(shown(task, "test"), images.reshape(20, 4, 6, 1))


def test_colour_is_made_grey_where_one_channel_is_asked_for(data):
    written(data, train=20, test=8)
    for name in ("images", "pixels"):
        found = shown(make_task(name, data=data, channels=1, **SMALL), "test")
        assert np.array_equal(found[..., 0], grey_by_definition(pictures(8, 1)))


def test_pixel_values_are_normalized_by_channel_and_channels_come_first(data):
    written(data, train=20, test=12)
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 1.0]
    found = batch(make_task("images", data=data, mean=mean, std=std, **SMALL), "test")
    want = (pictures(12, 1) / 255 - mean) / std
    assert found["pixel_values"].dtype == torch.float32
    assert found["pixel_values"].is_contiguous()
    assert np.allclose(found["pixel_values"], want.transpose(0, 3, 1, 2), atol=1e-6)
    plain = batch(make_task("images", data=data, **SMALL), "test")["pixel_values"]
    assert np.allclose(plain, ((pictures(12, 1) / 255 - 0.5) / 0.25).transpose(0, 3, 1, 2), atol=1e-6)


def test_values_of_pixels_come_row_by_row_with_the_channels_innermost(data):
    written(data, train=20, test=12)
    found = batch(make_task("pixels", data=data, **SMALL), "test")
    assert np.array_equal(found["input_ids"].numpy(), pictures(12, 1).reshape(12, 72))
    assert torch.equal(found["labels"], found["input_ids"])


def test_settings_are_known_without_data():
    assert make_task("grey").settings() == {
        "vocab_size": 256,
        "max_position_embeddings": 1024,
        "num_labels": 10,
        "pad_token_id": None,
    }
    assert make_task("images", size=[8, 12], channels=1, classes=7).settings() == {
        "image_size": [8, 12],
        "num_channels": 1,
        "num_labels": 7,
    }
    assert make_task("pixels", size=[8, 12]).settings() == {
        "vocab_size": 256,
        "image_size": [8, 12],
        "num_channels": 3,
        "max_position_embeddings": 288,
        "pad_token_id": None,
    }


@pytest.mark.parametrize("name", TASKS)
def test_without_data_only_reading_fails(name):
    task = make_task(name)
    for ask in (lambda: task.split("train"), task.fingerprint):
        with pytest.raises(ValueError, match=r"needs data, got None; give the path.*train.npz, or in train/"):
            ask()


def test_scores_are_accuracy_and_bits():
    outcome = Outcome(loss=2.0, right=0.75)
    assert make_task("grey").score(outcome) == make_task("images").score(outcome) == {"accuracy": 0.75}
    both = Outcome(loss=2.0, right=0.5, top5=0.75)
    assert make_task("images").score(both) == {"accuracy": 0.5, "top5_accuracy": 0.75}
    assert make_task("grey").extra_metrics() == make_task("images").extra_metrics() == ["top5_accuracy"]
    assert make_task("images", classes=5).extra_metrics() == []
    assert make_task("pixels").score(outcome) == {"bits_per_dimension": 2.0 / math.log(2)}


@pytest.mark.parametrize("name", ["grey", "images"])
def test_the_baseline_is_the_class_that_training_has_most(data, name):
    np.savez(data / "train.npz", images=pictures(5), labels=[3, 1, 3, 2, 3])
    np.savez(data / "validation.npz", images=pictures(4), labels=[1, 1, 1, 3])
    task = make_task(name, data=data, **SMALL)
    assert task.baselines("validation") == {"most frequent class": {"accuracy": 0.25}}


def views(image, pad):
    """All that cropping and flipping may make of an image, and how: (flipped, row, column)."""
    rows, columns, _ = image.shape
    padded = np.pad(image, ((pad[0], pad[0]), (pad[1], pad[1]), (0, 0)))
    for row in range(2 * pad[0] + 1):
        for column in range(2 * pad[1] + 1):
            crop = padded[row : row + rows, column : column + columns]
            yield (False, row, column), crop
            yield (True, row, column), crop[:, ::-1]


@pytest.mark.parametrize(("augment", "pad"), [("flip", (0, 0)), ("crop", (1, 2))])
def test_every_view_is_as_likely_as_the_others(data, augment, pad):
    images = pictures(10, shape=(8, 16, 3))
    np.savez(data / "train.npz", images=images, labels=labels(10))
    np.savez(data / "validation.npz", images=images, labels=labels(10))
    task = make_task("images", data=data, size=[8, 16], augment=augment, views=300)
    assert len(task.split("train")) == 3000
    known = [{crop.tobytes(): how for how, crop in views(image, pad)} for image in images]
    count = dict.fromkeys(known[0].values(), 0)
    assert len(count) == 2 * (2 * pad[0] + 1) * (2 * pad[1] + 1)
    for i, sample in enumerate(task.split("train").__getitems__(range(3000))):
        count[known[i % 10][sample["pixels"].numpy().tobytes()]] += 1
        assert sample["labels"] == i % 10
    share = 1 / len(count)
    error = math.sqrt(3000 * share * (1 - share))
    assert all(abs(n - 3000 * share) <= SIGMAS * error for n in count.values()), count
    assert np.array_equal(shown(task, "validation"), images)  # only training is augmented


def test_a_view_is_a_function_of_seed_and_index(data):
    written(data, train=30)
    options = {"data": data, "augment": "flip", "validation_share": 0.0, **SMALL}
    task, again = make_task("images", **options), make_task("images", **options)
    assert len(task.split("train")) == 10 * 30
    whole = shown(task)
    torch.manual_seed(3)
    for i in (299, 0, 17):
        assert np.array_equal(again.split("train")[i]["pixels"], whole[i])
    assert len({whole[i::30].tobytes() for i in range(30)}) == 30
    assert not np.array_equal(whole[:30], whole[30:60])
    other = make_task("images", **options, seed=1)
    assert not np.array_equal(shown(other), whole)
    assert np.array_equal(task.pictures.split("train").images(np.arange(30)), pictures(30))  # unchanged itself


@pytest.mark.parametrize("name", TASKS)
def test_validation_is_a_share_of_training_where_there_is_none(data, name):
    written(data, train=200, test=8)
    task = make_task(name, data=data, seed=5, **SMALL)
    parts = divide(200, {"validation": 0.1, "test": 0.0}, 5)
    images = pictures(200) if name != "grey" else decoding.grey(pictures(200))
    for split in ("train", "validation"):
        assert np.array_equal(shown(task, split), images[parts[split]])
        if name != "pixels":
            assert batch(task, split)["labels"].tolist() == labels(200)[parts[split]].tolist()
    assert len(task.split("test")) == 8
    assert task.split("train").pixels is task.split("validation").pixels  # read once
    assert task.remarks() == []


def test_other_names_of_splits_are_known_and_a_file_alone_is_divided(data):
    written(data, train=20, val=7)
    assert np.array_equal(shown(make_task("images", data=data, **SMALL), "validation"), pictures(7, 1))
    alone = make_task("pixels", data=data / "train.npz", validation_share=0.2, test_share=0.3, **SMALL)
    parts = divide(20, {"validation": 0.2, "test": 0.3}, 0)
    for split, chosen in parts.items():
        assert np.array_equal(shown(alone, split), pictures(20)[chosen])


def test_two_names_of_one_split_are_refused(data):
    written(data, train=20, val=7, validation=5)
    for name in TASKS:
        with pytest.raises(ValueError, match=r"has val\.npz and validation\.npz; keep one file for each split"):
            make_task(name, data=data, **SMALL).split("train")
    (data / "val.npz").unlink()
    saved(data, pictures(1), ["training/a/0.png"])
    with pytest.raises(ValueError, match=r"has train\.npz and training; keep one file for each split"):
        make_task("pixels", data=data, **SMALL).split("validation")


def test_limits_take_images_that_are_spread_evenly(data):
    written(data, train=100, validation=10, test=10)
    task = make_task("images", data=data, train_samples=4, validation_samples=10, test_samples=99, **SMALL)
    assert np.array_equal(shown(task), pictures(100)[[0, 25, 50, 75]])
    assert batch(task)["labels"].tolist() == [0, 5, 0, 5]
    assert len(task.split("validation")) == len(task.split("test")) == 10


@pytest.mark.parametrize("name", TASKS)
def test_a_loader_takes_it_and_indices_are_checked(data, name):
    written(data, train=20, test=10)
    task = make_task(name, data=data, **SMALL)
    loader = DataLoader(task.split("test"), batch_size=4, collate_fn=task.collate)
    assert [len(x["labels"]) for x in loader] == [4, 4, 2]
    for index in (-1, 10):
        with pytest.raises(IndexError, match="numbered from 0 to 9"):
            task.split("test")[index]


CLASSES = ["b", "a", "10", "9"]


def class_folders(data, count=12, split="train", ending="png"):
    """Image i is in folder i % 4; gives the order in which they are read, and their labels."""
    images = pictures(count)
    names = [f"{split}/{CLASSES[i % 4]}/{i:03}.{ending}" for i in range(count)]
    saved(data, images, names)
    order = sorted(range(count), key=lambda i: names[i])
    return images[order], [["10", "9", "a", "b"].index(CLASSES[i % 4]) for i in order]


def test_classes_are_the_sorted_names_of_the_training_folders(data):
    images, wanted = class_folders(data)
    saved(data, pictures(3, 7), ["validation/9/x.png", "validation/b/deep/er.PNG", "validation/b/z.png"])
    task = make_task("images", data=data, classes=4, **SMALL)
    assert np.array_equal(shown(task), images)
    assert batch(task)["labels"].tolist() == wanted
    assert batch(task, "validation")["labels"].tolist() == [1, 3, 3]
    assert np.array_equal(shown(task, "validation"), pictures(3, 7))
    assert task.remarks() == []
    assert np.array_equal(shown(make_task("grey", data=data, classes=4, **SMALL)), decoding.grey(images))


def test_what_is_no_image_of_a_class_is_left_out_and_counted(data):
    class_folders(data)
    (data / "train" / "a" / "notes.txt").write_text("x")
    (data / "train" / ".hidden.png").write_text("x")
    saved(data, pictures(1), ["train/alone.png"])
    task = make_task("images", data=data, **SMALL)
    assert len(task.split("train")) + len(task.split("validation")) == 12
    assert [x.split("/data/")[1] for x in task.remarks()] == [
        "train that are no images (.png, .jpg, .jpeg) in a folder of a class; the first: a/notes.txt",
        "train has 4 classes, the model 10",
    ]
    assert task.remarks()[0].startswith("left out 2 files of ")


def test_classes_that_do_not_fit_are_refused(data):
    class_folders(data)
    with pytest.raises(ValueError, match="train has 4 classes, got classes=3; give classes=4"):
        make_task("images", data=data, classes=3, **SMALL).split("train")
    saved(data, pictures(1), ["validation/c/0.png"])
    with pytest.raises(ValueError, match="validation has the class c, which training has not: 10, 9, a, b"):
        make_task("images", data=data, classes=4, **SMALL).split("validation")


def test_pixels_need_no_labels_and_no_classes(data):
    np.savez(data / "train.npz", images=pictures(20))
    assert len(make_task("pixels", data=data, validation_share=0.0, **SMALL).split("train")) == 20
    (data / "train.npz").unlink()
    saved(data, pictures(30), [f"{i % 2}/{i:02}.png" for i in range(30)])
    order = [*range(0, 30, 2), *range(1, 30, 2)]
    task = make_task("pixels", data=data, **SMALL)
    parts = divide(30, {"validation": 0.1, "test": 0.1}, 0)
    for split in ("train", "validation"):
        assert np.array_equal(shown(task, split), pictures(30)[order][parts[split]])
    os.rename(data / "0", data / "train")
    os.rename(data / "1", data / "test")
    assert np.array_equal(shown(make_task("pixels", data=data, **SMALL), "test"), pictures(30)[1::2])


def test_a_palette_is_colour_and_lossy_jpeg_is_read_as_pillow_does(data):
    image = Image.fromarray(pictures(1)[0])
    (data / "train" / "a").mkdir(parents=True)
    image.quantize(24).save(data / "train" / "a" / "0.png")
    image.save(data / "train" / "a" / "1.JPEG", format="jpeg")
    task = make_task("images", data=data, validation_share=0.0, **SMALL)
    with Image.open(data / "train" / "a" / "1.JPEG") as jpeg:
        assert np.array_equal(shown(task), np.stack([image.quantize(24).convert("RGB"), jpeg]))


def test_images_are_made_to_fit_only_when_asked(data):
    images = pictures(4, shape=(8, 20, 3))
    saved(data, [*images, *pictures(2), np.zeros((4, 6), np.uint8)], [f"train/a/{i}.png" for i in range(7)])
    options = {"data": data, "classes": 2, "validation_share": 0.0, **SMALL}
    with pytest.raises(ValueError, match=r"train, a/0.png: it has 8 x 20 pixels, not 4 x 6; mend it"):
        make_task("images", **options).split("train")
    task = make_task("images", **options, resize=True)
    found = shown(task)
    assert np.array_equal(found[4:6], pictures(2))
    for image, small in zip(images, found, strict=False):  # scaled by a half, and cropped in the middle
        want = np.asarray(Image.fromarray(image).resize((10, 4), Image.Resampling.BICUBIC))[:, 2:8]
        assert np.array_equal(small, want)
    assert not found[6].any()
    assert any("made 5 of 7 images of" in x and "fit: 4 x 6 and 3 channels" in x for x in task.remarks())
    (data / "npz").mkdir()
    np.savez(data / "npz" / "train.npz", images=images, labels=labels(4))
    again = make_task("images", **options | {"data": data / "npz", "classes": 10}, resize=True)
    assert np.array_equal(shown(again), found[:4])


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1), (8, 12, 1)])
def test_grey_arrays_become_colour_where_images_are_made_to_fit(data, shape):
    images = pictures(4, shape=shape)
    np.savez(data / "train.npz", images=images, labels=labels(4))
    options = {"data": data, "validation_share": 0.0, **SMALL}
    with pytest.raises(ValueError, match=r"give size and channels as they are, or resize=True"):
        make_task("images", **options).split("train")
    task = make_task("images", **options, resize=True)
    names = [f"files/train/{i}/0.png" for i in range(4)]
    saved(data, images.reshape(4, *shape[:2]), names)
    files = make_task("images", **options | {"data": data / "files", "classes": 4}, resize=True)
    assert np.array_equal(shown(task), shown(files))
    assert any("made 4 of 4 images of" in x for x in task.remarks())
    if shape[0] == 4:
        assert np.array_equal(shown(task), np.repeat(images.reshape(4, 4, 6, 1), 3, -1))


def test_resizing_is_no_advice_for_what_is_no_image(data):
    np.savez(data / "train.npz", images=pictures(4, shape=(4, 6, 2)), labels=labels(4))
    for resize in (False, True):
        with pytest.raises(ValueError, match=r"got uint8 \(4, 4, 6, 2\); change the array\."):
            make_task("images", data=data, resize=resize, **SMALL).split("train")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 4\n%%EndComments\nshowpage\n%%EOF\n"


def test_formats_that_run_programs_are_not_opened(data, hub_cache, monkeypatch):
    class_folders(data, 40)
    assert Image.open(io.BytesIO(EPS)).format == "EPS"
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("it was run"))
    sorted((data / "train").rglob("*.png"))[3].write_bytes(EPS)
    for place in (data, f"hub:{data}"):
        with pytest.raises(ValueError, match=r"it is no whole image \(cannot identify image file"):
            make_task("images", data=place, classes=4, resize=True, **SMALL).split("train")


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    return datasets


def test_hub_data_sets_are_read_by_their_columns(data, hub_cache):
    images, wanted = class_folders(data, 40)
    task = make_task("images", data=f"hub:{data}", classes=4, **SMALL)
    parts = divide(40, {"validation": 0.1, "test": 0.0}, 0)
    for split in ("train", "validation"):
        assert np.array_equal(shown(task, split), images[parts[split]])
        assert batch(task, split)["labels"].tolist() == np.array(wanted)[parts[split]].tolist()
    assert "hub:" in task.fingerprint()
    with pytest.raises(ValueError, match="has no test split, found train; add one"):
        task.split("test")
    assert len(make_task("pixels", data=f"hub:{data}", **SMALL).split("train")) == len(parts["train"])
    with pytest.raises(ValueError, match=r"row 20: label must be an integer from 0 to 1, got 2"):
        make_task("images", data=f"hub:{data}", classes=2, **SMALL).split("train")


def test_hub_columns_that_do_not_fit_are_named(data, hub_cache):
    (data / "train.jsonl").write_text('{"img": 3, "text": "x"}\n')
    with pytest.raises(ValueError, match="has no column 'label', found img, text; a row must have image and label"):
        make_task("grey", data=f"hub:{data}").split("train")
    with pytest.raises(ValueError, match=r"column img of hub:.* must hold images, got Value"):
        make_task("pixels", data=f"hub:{data}").split("train")


def damaged(path):
    path.write_bytes(path.read_bytes()[:-40])


def test_bad_images_are_named_or_left_out_and_counted(data):
    images, wanted = class_folders(data)
    files = sorted((data / "train").rglob("*.png"))
    damaged(files[1])
    files[4].write_text("no image")
    Image.fromarray(images[5]).convert("RGBA").save(files[5])
    Image.fromarray(images[6][:2]).save(files[6])
    Image.fromarray(images[7][..., 0]).save(files[7])
    files[8].unlink()
    files[8].symlink_to("nowhere")
    options = {"data": data, "classes": 4, "validation_share": 0.0, **SMALL}
    task = make_task("images", **options, skip_bad=True)
    good = [0, 2, 3, 9, 10, 11]
    assert np.array_equal(shown(task), images[good])
    assert batch(task)["labels"].tolist() == np.array(wanted)[good].tolist()
    assert len(task.remarks()) == 1
    assert "left out 6 of 12 rows of" in task.remarks()[0]
    assert "the first: 10/006.png: it is no whole image (" in task.remarks()[0]
    assert task.fingerprint()
    reasons = {
        1: r"10/006.png: it is no whole image \(.*truncated",
        4: r"9/007.png: it is no whole image \(cannot identify",
        5: "9/011.png: its mode is RGBA, not RGB, as channels=3 says",
        6: "a/001.png: it has 2 x 6 pixels, not 4 x 6",
        7: "a/005.png: its mode is L, not RGB",
        8: r"a/009.png: it is no whole image \(.*No such file",
    }
    for number, reason in reasons.items():  # also where the cache knows them all, and where it knows nothing
        for cache in (None, data / "empty" / str(number)):
            with pytest.raises(ValueError, match=f"train, {reason}.*skip_bad=True"):
                make_task("images", **options, cache=cache).split("train")
        files[number].unlink()
        Image.fromarray(images[number]).save(files[number])
    assert np.array_equal(shown(make_task("images", **options)), images)


def test_labels_out_of_range_are_named_or_left_out(data):
    np.savez(data / "train.npz", images=pictures(6), labels=np.array([0, 9, 10, -1, 3, 4]))
    options = {"data": data, "validation_share": 0.0, **SMALL}
    with pytest.raises(ValueError, match=r"train.npz, image 2: label must be an integer from 0 to 9, got 10; mend it"):
        make_task("images", **options).split("train")
    task = make_task("grey", **options, skip_bad=True)
    assert batch(task)["labels"].tolist() == [0, 9, 3, 4]
    assert np.array_equal(shown(task), decoding.grey(pictures(6))[[0, 1, 4, 5]])
    assert "left out 2 of 6 rows" in task.remarks()[0]


GOOD = {"images": pictures(4), "labels": labels(4)}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": GOOD["images"], "labels": labels(4)}, "has no array images, found x, labels"),
        ({"images": GOOD["images"]}, "has no array labels, found images"),
        ({**GOOD, "images": GOOD["images"] / 255}, r"must be uint8 .*got float64 \(4, 4, 6, 3\)"),
        ({**GOOD, "images": GOOD["images"].astype(object)}, "must be uint8 .*got object"),
        ({**GOOD, "images": GOOD["images"][:, :3]}, r"= \(N, 4, 6, 3\), got uint8 \(4, 3, 6, 3\).*resize=True"),
        ({**GOOD, "images": GOOD["images"].transpose(0, 3, 1, 2)}, r"got uint8 \(4, 3, 4, 6\)"),
        ({**GOOD, "images": GOOD["images"][..., 0]}, r"= \(N, 4, 6, 3\), got uint8 \(4, 4, 6\)"),
        ({**GOOD, "images": GOOD["images"][..., :2]}, r"got uint8 \(4, 4, 6, 2\)"),
        ({**GOOD, "images": np.uint8(3)}, r"got uint8 \(\)"),
        ({**GOOD, "labels": labels(4) / 2}, "must be integers, one for each of 4 images, got float64"),
        ({**GOOD, "labels": labels(3)}, r"one for each of 4 images, got int64 \(3,\)"),
        ({**GOOD, "labels": labels(4)[:, None]}, r"one for each of 4 images, got int64 \(4, 1\)"),
        ({**GOOD, "labels": labels(4).astype(object)}, "must be integers, one for each of 4 images, got object"),
        ({"images": GOOD["images"][:0], "labels": labels(0)}, "train split of .* is empty: 0 good images; add some"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(data, arrays, message):
    np.savez(data / "train.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        make_task("images", data=data, **SMALL).split("train")


def test_files_that_are_no_archives_are_refused(data):
    whole = written(data, train=20) / "train.npz"
    content = whole.read_bytes()
    flipped = bytearray(content)
    flipped[600] ^= 1  # in the pixels: the archive has a checksum of them
    for wrong in (b"", b"not an archive", content[: len(content) // 2], bytes(flipped)):
        whole.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"train.npz cannot be read as npz \(.*\); write it again"):
            make_task("images", data=data, **SMALL).split("train")
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("images.npy", "x")
    with pytest.raises(ValueError, match="cannot be read as npz"):
        make_task("images", data=data, **SMALL).split("train")


def head_of(shape, descr="|u1"):
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue()


@pytest.mark.parametrize(
    ("shape", "pixels"),
    [((1 << 40, 4, 6, 3), 72), ((4, 4, 6, 3), 287), ((4, 4, 6, 3), 289), ((-4, 4, 6, 3), 288), ((3, 4, 6, 3), 288)],
)
def test_a_head_that_promises_other_than_the_file_has_is_refused_before_it_is_read(data, monkeypatch, shape, pixels):
    with zipfile.ZipFile(data / "train.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", head_of(shape) + bytes(pixels))
        archive.writestr("labels.npy", head_of((4,), "<i8") + bytes(32))
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(ValueError, match=rf"npz \(images says uint8 \({shape[0]}, .* bytes, but has .*write it again"):
        make_task("pixels", data=data, **SMALL).split("train")


def test_encrypted_archives_and_too_little_memory_are_refused(data, monkeypatch):
    path = written(data, train=20) / "train.npz"
    whole = path.read_bytes()
    locked = bytearray(whole)
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = locked.find(mark)
        while place >= 0:
            locked[place + flags] |= 1
            place = locked.find(mark, place + 4)
    path.write_bytes(locked)
    with pytest.raises(ValueError, match=r"cannot be read as npz \(.*is encrypted"):
        make_task("images", data=data, **SMALL).split("train")
    path.write_bytes(whole)

    def short(*_, **__):
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr(np, "load", short)
    with pytest.raises(ValueError, match=r"cannot be read as npz \(Unable to allocate"):
        make_task("images", data=data, **SMALL).split("train")


def test_places_without_the_layout_are_refused(data):
    with pytest.raises(ValueError, match=r"has no train split, found nothing; it must hold images and labels in train"):
        make_task("grey", data=data).split("train")
    (data / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"has no train split, found notes.txt; it must hold images in train.npz"):
        make_task("pixels", data=data).split("train")
    with pytest.raises(ValueError, match=r"notes.txt must be a folder or end in .npz, got '.txt'"):
        make_task("pixels", data=data / "notes.txt").split("train")
    with pytest.raises(ValueError, match="there is no file or folder"):
        make_task("pixels", data=data / "nowhere")
    class_folders(data, 4)
    written(data, train=3)
    with pytest.raises(ValueError, match=r"has train and train.npz; keep one file for each split"):
        make_task("images", data=data).split("train")


def test_empty_splits_are_refused(data):
    written(data, train=3)
    for name in TASKS:
        task = make_task(name, data=data, validation_share=0.0, **SMALL)
        with pytest.raises(ValueError, match=r"validation split of .* is empty: 3 good images; add some, or give a la"):
            task.split("validation")
        with pytest.raises(ValueError, match="has no test split, found train; add one, or evaluate another"):
            task.split("test")
        with pytest.raises(ValueError, match="unknown split 'valid'"):
            task.split("valid")
    (data / "test").mkdir()
    with pytest.raises(ValueError, match=r"the test split of .* is empty: 0 good images"):
        make_task("pixels", data=data, **SMALL).split("test")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grey", {"size": 0}, "size must be an integer of at least 1, got 0"),
        ("images", {"size": [4, 4, 3]}, r"size must be an integer or \[rows, columns\], got \[4, 4, 3\]"),
        ("images", {"size": "32"}, "size must be an integer of at least 1, got '32'"),
        ("images", {"channels": 2}, r"channels must be 1 \(grey\) or 3"),
        ("grey", {"classes": 1}, "classes must be an integer of at least 2, got 1"),
        ("images", {"mean": [0.5]}, r"mean must be a number or one for each of 3 channels, got \[0.5\]"),
        ("images", {"std": 0}, "std must be a finite number above 0, got 0"),
        ("images", {"augment": "mix"}, "unknown augment 'mix'; choose from crop, flip, none"),
        ("images", {"views": 2}, "views=2 need augment='flip' or 'crop', got 'none'"),
        ("images", {"augment": "flip", "views": 0}, "views must be an integer of at least 1, got 0"),
        ("pixels", {"train_samples": 0}, "train_samples must be an integer of at least 1, got 0"),
        ("pixels", {"validation_share": 1.0}, "must leave something to train on"),
        ("pixels", {"resize": "no"}, "resize must be True or False, got 'no'"),
        ("pixels", {"size": 1, "channels": 1}, "an image must have at least two values, got size=1 and channels=1"),
        ("pixels", {"classes": 3}, "unknown option for task 'pixels', 'classes'"),
        ("grey", {"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ("grey", {"skip_bad": 1}, "skip_bad must be True or False, got 1"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_task(name, **options)


def test_a_fingerprint_tells_data_apart_but_not_where_it_is(data, tmp_path):
    one, two, other = (tmp_path / x for x in ("one", "two", "other"))
    for folder in (one, two, other):
        folder.mkdir()
        written(folder, train=5, test=5)
    prints = {x: make_task("images", data=x).fingerprint() for x in (one, two)}
    assert prints[one] == prints[two] == make_task("grey", data=one, train_samples=2).fingerprint()
    np.savez(other / "test.npz", images=pictures(5, 9), labels=labels(5))
    assert make_task("images", data=other).fingerprint() != prints[one]
    class_folders(data)
    before = make_task("images", data=data).fingerprint()
    assert "12 files" in before
    (data / "train" / "a" / "001.png").rename(data / "train" / "b" / "001.png")
    assert make_task("images", data=data).fingerprint() != before


def test_decoded_images_are_kept_and_used_again(data, tmp_path, monkeypatch):
    images, _ = class_folders(data)
    options = {"data": data, "classes": 4, "validation_share": 0.0, **SMALL}
    assert np.array_equal(shown(make_task("images", **options)), images)
    cache = tmp_path / "xdg" / "kernelformer"
    assert sorted(x.suffix for x in cache.iterdir()) == [".json", ".npy"]
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "inspect_image", lambda *_: pytest.fail("decoded again"))
        assert np.array_equal(shown(make_task("images", **options)), images)
    path = data / "train" / "a" / "001.png"
    Image.fromarray(255 - pictures(12)[1]).save(path)
    os.utime(path, ns=(1, 1))
    assert not np.array_equal(shown(make_task("images", **options)), images)
    assert len(shown(make_task("grey", **options))) == 12  # of another form: neither is taken for the other
    assert len(list(cache.iterdir())) == 6


def test_a_damaged_cache_is_named(data, tmp_path):
    class_folders(data)
    options = {"data": data, "classes": 4, "cache": tmp_path / "c", **SMALL}
    make_task("images", **options).split("train")
    for path in sorted((tmp_path / "c").iterdir()):
        whole = path.read_bytes()
        for wrong in (b"", whole[: len(whole) // 2]):
            path.write_bytes(wrong)
            with pytest.raises(ValueError, match=r"the cache file .*json, or the .npy file beside it.*delete both"):
                make_task("images", **options).split("train")
        path.write_bytes(whole)
    make_task("images", **options).split("train")


def test_a_cache_that_cannot_be_written_leaves_nothing_behind(data, tmp_path, monkeypatch):
    class_folders(data)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written: .*; give another folder as cache"):
        make_task("images", data=data, classes=4, cache=tmp_path / "file", **SMALL).split("train")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kernelformer.files.sync", full)
    with pytest.raises(ValueError, match="the disk is full; give another folder as cache"):
        make_task("images", data=data, classes=4, cache=tmp_path / "c", **SMALL).split("train")
    assert list((tmp_path / "c").iterdir()) == []


def test_a_bad_image_leaves_no_half_cache(data, tmp_path):
    class_folders(data)
    damaged(data / "train" / "b" / "008.png")
    with pytest.raises(ValueError, match=r"008.png"):
        make_task("images", data=data, classes=4, cache=tmp_path / "c", **SMALL).split("train")
    assert list((tmp_path / "c").iterdir()) == []


def test_what_is_too_large_for_the_cache_is_decoded_on_demand(data, tmp_path, monkeypatch):
    images, _ = class_folders(data)
    Image.fromarray(images[3][:2]).save(data / "train" / "9" / "003.png")
    monkeypatch.setattr(decoding, "CACHED", 12 * 72 - 1)
    options = {"data": data, "classes": 4, "validation_share": 0.0, **SMALL}
    with pytest.raises(ValueError, match=r"003.png: it has 2 x 6 pixels, not 4 x 6"):  # the heads tell
        make_task("images", **options).split("train")
    task = make_task("images", **options, skip_bad=True)
    assert np.array_equal(shown(task), np.delete(images, 3, 0))
    assert isinstance(task.split("train").pixels, decoding.OnDemand)
    assert [x.suffix for x in (tmp_path / "xdg" / "kernelformer").iterdir()] == [".json"]
    damaged(data / "train" / "b" / "000.png")
    with pytest.raises(ValueError, match=r"train, b/000.png: it is no whole image \(.*; mend or remove it"):
        shown(task)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_large_arrays_are_mapped_from_the_cache(data, tmp_path, monkeypatch, save):
    save(data / "train.npz", images=pictures(20), labels=labels(20))
    monkeypatch.setattr(npz, "MEMORY", 20 * 72 - 1)
    options = {"data": data, "validation_share": 0.0, **SMALL}
    assert np.array_equal(shown(make_task("images", **options)), pictures(20))
    (kept,) = (tmp_path / "xdg" / "kernelformer").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(npz, "_blocks", lambda *_: pytest.fail("unpacked again"))
        task = make_task("images", **options)
        assert np.array_equal(shown(task), pictures(20))
    base = task.split("train").pixels
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"the cache file .*npy cannot be used .*delete it"):
        make_task("images", **options).split("train")


def test_nothing_in_a_file_is_run(data):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("it was run",))

    content = io.BytesIO()
    np.savez(content, images=pictures(4), labels=np.array([Trap()] * 4, dtype=object))
    (data / "train.npz").write_bytes(content.getvalue())
    with pytest.raises(ValueError, match="must be integers, one for each of 4 images, got object"):
        make_task("grey", data=data, **SMALL).split("train")


def test_tokens_of_a_run_on_images_are_its_patches(data, tmp_path):
    written(data, train=12, validation=4, test=4)
    model = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 2, "pooling": "cls"}
    options = {"data": str(data), **SMALL, "classes": 10}
    run = Run(task="images", attention="elu", task_options=options, model=model, steps=3, batch_size=4, log_every=1)
    train(run, tmp_path / "run")
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [x["tokens"] for x in lines if "loss" in x] == [4 * n * (2 * 3 + 1) for n in (1, 2, 3)]
