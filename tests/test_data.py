import json

import datasets
import pytest

from ajgrpo.data import CHECKED_ROWS, check_dataset, load_train_dataset
from ajgrpo.errors import ConfigError, DatasetError

ROWS = [{"prompt": [{"role": "user", "content": f"{a} + 1?"}], "answer": str(a + 1)} for a in range(3)]


def make_dataset(count: int = 3):
    return datasets.Dataset.from_list(ROWS[:count])


def make_splits():
    return datasets.DatasetDict(train=make_dataset(), test=make_dataset(1))


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(prompt):
    return datasets.IterableDataset.from_generator(lambda: iter([ROWS[0], {"prompt": prompt}]))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_file(tmp_path, suffix):
    path = tmp_path / f"prompts{suffix}"
    if suffix == ".parquet":
        make_dataset().to_parquet(str(path))
    else:
        write_jsonl(path)
    dataset = load_train_dataset(str(path))
    assert dataset.to_list() == ROWS
    check_dataset(dataset)


def test_a_csv_file_is_loaded_and_its_text_prompts_are_refused(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text("prompt,answer\n3 + 4?,7\n")
    with pytest.raises(DatasetError, match=r"row 0: 'prompt' is text, '3 \+ 4\?'.*Convert it: dataset\.map"):
        check_dataset(load_train_dataset(str(path)))


def test_directories(tmp_path):
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl")
    make_dataset().save_to_disk(tmp_path / "saved")
    make_splits().save_to_disk(tmp_path / "splits")
    for name in ("files", "saved", "splits"):
        assert load_train_dataset(str(tmp_path / name)).to_list() == ROWS
    assert len(load_train_dataset(str(tmp_path / "splits"), split="test")) == 1
    with pytest.raises(DatasetError, match="has no split 'dev'; its splits are train, test"):
        load_train_dataset(str(tmp_path / "splits"), split="dev")


def test_a_function():
    assert load_train_dataset("tests.test_data.make_dataset", kwargs={"count": 2}).to_list() == ROWS[:2]
    assert load_train_dataset("tests.test_data.make_splits").to_list() == ROWS
    with pytest.raises(ConfigError, match="did you mean 'make_dataset'"):
        load_train_dataset("tests.test_data.make_datasets")


def test_options_reach_the_loader(tmp_path):
    streamed = load_train_dataset(write_jsonl(tmp_path / "p.jsonl"), kwargs={"streaming": True})
    assert isinstance(streamed, datasets.IterableDataset)
    assert list(streamed) == ROWS
    check_dataset(streamed)


@pytest.mark.parametrize(
    ("name", "content"), [("p.jsonl", '{"prompt": '), ("p.txt", "hello"), ("p.parquet", "no"), (None, None)]
)
def test_what_cannot_be_read_is_named(tmp_path, name, content):
    source = str(tmp_path / name) if name else "some-owner/absent-dataset"
    if name:
        (tmp_path / name).write_text(content)
    with pytest.raises(DatasetError, match=source):
        load_train_dataset(source)


def test_sound_datasets():
    check_dataset(make_dataset())
    check_dataset(make_dataset().to_iterable_dataset())
    check_dataset(datasets.Dataset.from_list([{"task": "maze"}]), require_prompt=False)
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "3 + 4?"}]}]
    for prompt in (calls, parts):
        check_dataset(row(prompt))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "must be a datasets.Dataset or datasets.IterableDataset, got nothing"),
        (ROWS, "must be a datasets.Dataset or datasets.IterableDataset, got list"),
        (make_splits(), r"holds several splits \(train, test\); pass one"),
        (make_dataset(0), "train_dataset is empty"),
        (datasets.Dataset.from_dict({"question": ["a"], "x": [1]}), "no column 'prompt'; its columns are question, x"),
        (row("hi"), "row 1: 'prompt' is text, 'hi'"),
        (row([]), r"row 1: 'prompt' must be a non-empty list of messages .* got \[\]"),
        (row(None), "row 1: .* got None"),
        (row(["hi"]), "row 1: .* a message is not a dict: 'hi'"),
        (row([{"role": "robot", "content": "a"}]), "row 1: .* role is not one of .*'robot'"),
        (row([{"from": "human", "value": "a"}]), "row 1: .* role is not one of .*'human'"),
        (row([{"role": "user", "content": None}]), "row 1: .* content is not text"),
        (row([{"role": "user", "content": [{"type": "image"}]}]), "row 1: .* something other than text: .*'image'"),
    ],
)
def test_unsound_datasets(dataset, message):
    with pytest.raises(DatasetError, match=message):
        check_dataset(dataset)


def test_the_row_that_is_wrong_is_found_among_the_first_thousand():
    good, bad = ROWS[0]["prompt"], []
    dataset = datasets.Dataset.from_dict({"prompt": [good] * (CHECKED_ROWS - 1) + [bad]})
    with pytest.raises(DatasetError, match=f"row {CHECKED_ROWS - 1}: "):
        check_dataset(dataset)


@pytest.mark.parametrize("column", ["completions", "completion_ids", "prompts"])
def test_columns_that_reward_functions_get_from_elsewhere_are_refused(column):
    dataset = make_dataset().rename_column("answer", column)
    with pytest.raises(DatasetError, match=rf"columns named {column}, .*rename_column\('{column}', 'reference'\)"):
        check_dataset(dataset)
