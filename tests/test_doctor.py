from ajgrpo import doctor
from tests.test_dry_run import Server, server_url  # noqa: F401
from tests.test_preflight import TOKENIZER, server_info

OPTIONS = [
    "--model",
    "builtin:tiny-arithmetic",
    "--reward_funcs",
    "exact_match_reward",
    "--dataset",
    "ajgrpo.arithmetic.make_dataset",
    "--bf16",
    "false",
]


def test_the_table_and_the_status(server_url, monkeypatch, capsys):  # noqa: F811
    options = [*OPTIONS, "--max_completion_length", "100", "--vllm_server_base_url", server_url]
    assert doctor.main(options) == 0
    assert "processed_logprobs" in capsys.readouterr().out
    raw = server_info("model_config", logprobs_mode="raw_logprobs", max_logprobs=3)
    monkeypatch.setitem(Server.replies, "/server_info", raw["/server_info"])
    monkeypatch.setitem(Server.replies, "/tokenize", {"tokens": TOKENIZER.encode("x", add_special_tokens=False)})
    assert doctor.main(options) == 1
    printed = capsys.readouterr().out
    assert printed.count("failed") == 3, printed
    assert "--logprobs-mode" in printed


def test_what_cannot_be_examined(capsys):
    assert doctor.main([*OPTIONS, "--vllm_server_base_url", "embedded"]) == 2
    assert "starts that server itself" in capsys.readouterr().err
    assert doctor.main(["--help"]) == 0
    assert "ajgrpo.doctor" in capsys.readouterr().out
    assert doctor.main([*OPTIONS, "--vllm_server_base_url", "http://127.0.0.1:9"]) == 1
