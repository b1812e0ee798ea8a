import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ajgrpo import cli, dry_run
from ajgrpo.dry_run import findings, readable, state_bytes
from ajgrpo.hf.io import read_config
from tests.test_preflight import GOOD, server_info

QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 16, "hidden_size": 8,
    "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 64,
    "hidden_act": "silu", "eos_token_id": 1,
}  # fmt: skip
# embedding 16·8; a layer: q, o 8·8 each, k, v 8·4 each, mlp 3·8·12, two norms of 8, q and k norms of 4; final norm 8
NUM_PARAMS = 128 + 2 * (2 * 64 + 2 * 32 + 288 + 16 + 8) + 8


def my_reward(completions, **kwargs):
    return [0.0 for _ in completions]


class StandIn:
    pass


def make_lambda():
    return lambda completions, **kwargs: []


unpicklable = make_lambda()


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN3))
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789+-*="])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def options(tmp_path, model):
    (tmp_path / "d.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": "3+4="}], "answer": "7"}) + "\n"
    )
    return {
        "model": model, "dataset": tmp_path / "d.jsonl", "reward_funcs": "tests.test_dry_run.my_reward",
        "trainer": "tests.test_dry_run.StandIn", "vllm_server_base_url": "embedded", "output_dir": tmp_path / "out",
    }  # fmt: skip


def check(options, **changes):
    """Title → (status, detail) of the findings for ``options`` with ``changes``."""
    run = cli.parse([f"--{name}={value}" for name, value in {**options, **changes}.items()]).run
    return {finding.title: (finding.status, finding.detail) for finding in findings(run)}


def failed(options, **changes):
    return {title: detail for title, (status, detail) in check(options, **changes).items() if status == "failed"}


def test_a_sound_run(options, model, tmp_path):
    found = check(options, **{"mesh.fsdp": 4})
    assert [title for title, (status, _) in found.items() if status != "ok"] == []
    assert found["model"][1] == f"qwen3, {NUM_PARAMS / 1e6:.4g}M parameters, {model}"
    assert found["tokenizer"][1] == "16 tokens, chat template of 62 characters"
    assert found["dataset"][1] == "1 rows, columns prompt, answer"
    assert found["reward functions"][1] == "tests.test_dry_run.my_reward"
    assert found["loss"][1] == "score_centering"
    assert found["devices"][1] == "8 × cpu; mesh: data 1, fsdp 4"
    assert found["server"][1] == "embedded: started by the trainer"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("dtype", "weight_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_memory_counts_weights_gradients_and_optimizer(options, model, dtype, weight_bytes):
    run = cli.parse([f"--{name}={value}" for name, value in {**options, "dtype": dtype}.items()]).run
    sizes = state_bytes(run, read_config(model)[1])
    assert sizes["weights"] == weight_bytes * NUM_PARAMS
    assert sizes["gradients"] == 4 * NUM_PARAMS
    # Two float32 moments a parameter, and the counters of the optimizer and its schedule.
    assert 0 < sizes["optimizer"] - 2 * 4 * NUM_PARAMS < 64


@pytest.mark.parametrize(
    ("changes", "title", "message"),
    [
        ({"dataset": "absent.jsonl"}, "dataset", "absent.jsonl"),
        ({"reward_funcs": "tests.test_dry_run.absent"}, "reward functions", "has no 'absent'"),
        ({"reward_funcs": "tests.test_dry_run.unpicklable"}, "reward functions", "lambda"),
        ({"tools": "tests.test_dry_run.unpicklable"}, "tools and environment", "lambda"),
        ({"callbacks": "tests.test_dry_run.my_reward"}, "callbacks and trackers", "ajgrpo.TrainerCallback"),
        ({"loss": "no_such_loss"}, "loss", "no_such_loss"),
        ({"trainer": "tests.test_dry_run.Absent"}, "trainer", "has no 'Absent'"),
        ({"output_dir": f"{__file__}/out"}, "output and resume", "is not a writable directory"),
        ({"resume_from_checkpoint": "absent"}, "output and resume", "there is no directory 'absent'"),
        ({"mesh.data": 3}, "devices", "does not fit the 8 available devices"),
        ({"vllm_server_base_url": "http://127.0.0.1:9"}, "server", "http://127.0.0.1:9"),
    ],
)
def test_one_mistake_is_one_failure(options, changes, title, message):
    found = failed(options, **changes)
    assert list(found) == [title]
    assert message in found[title]


def test_what_needs_the_model_is_not_checked_without_it(options):
    found = check(options, model="no/such/model")
    assert found["model"][0] == "failed"
    assert found["tokenizer"] == found["memory"] == ("not checked", "needs the model")


def test_a_tokenizer_without_a_chat_template_is_refused(options, model):
    (model / "chat_template.jinja").unlink()
    assert "no chat template" in failed(options)["tokenizer"]


class Server(BaseHTTPRequestHandler):
    replies = GOOD | {"/tokenize": {"detail": "not offered here"}}

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        reply = self.replies[self.path.partition("?")[0]]
        body = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def server_url():
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_server_is_asked(options, server_url, monkeypatch):
    found = check(options, vllm_server_base_url=server_url, max_completion_length=100)
    assert found["server"] == ("ok", f"tiny on version 0.32.0 at {server_url}")
    message = failed(options, vllm_server_base_url=server_url, max_completion_length=512)["server"]
    assert "max_completion_length=512 leaves no room for a prompt: the server's max_model_len is 512" in message
    raw = server_info("model_config", logprobs_mode="raw_logprobs")
    monkeypatch.setitem(Server.replies, "/server_info", raw["/server_info"])
    assert "--logprobs-mode processed_logprobs" in failed(options, vllm_server_base_url=server_url)["server"]


def test_the_table_and_the_status(options, monkeypatch):
    stream = io.StringIO()
    run = cli.parse([f"--{name}={value}" for name, value in options.items()]).run
    rows = [dry_run.Finding("model", "ok", "tiny [x]"), dry_run.Finding("server", "failed", "down")]
    monkeypatch.setattr(dry_run, "findings", lambda run: rows)
    assert dry_run.dry_run(run, Console(file=stream, width=80)) == 1
    text = stream.getvalue()
    assert "tiny [x]" in text
    assert "failed" in text
    rows.pop()
    assert dry_run.dry_run(run, Console(file=stream, width=80)) == 0


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 30, "3 GiB"), (5 << 50, "5120 TiB")])
def test_readable(size, text):
    assert readable(size) == text
