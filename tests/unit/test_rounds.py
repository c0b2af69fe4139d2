"""Rounds: rewards by rules and by code that was allowed, pairs, and steps none of which is done twice."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.speaker import write_random
from toolkit.cli import main
from toolkit.evaluate.rewards import Reward, best_and_worst_pairs, best_answers, read_lines, with_rewards, write_lines
from toolkit.extras import rounds
from toolkit.extras.cli import rounds as cli
from toolkit.launch.hostfile import select_gpus
from toolkit.messages import ConfigError, DataError, Stopped


def row(answer: str, where: str = "p.jsonl:1", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}], "where": where, "answer": answer, **more}


@pytest.mark.parametrize(
    ("reward", "answer", "expected"),
    [
        (Reward(kind="exact_match"), " 4\n", 1.0),
        (Reward(kind="exact_match"), "four", 0.0),
        (Reward(kind="json"), '{"a": [1]}', 1.0),
        (Reward(kind="json"), "{a}", 0.0),
        (Reward(kind="regex", pattern=r"^\d+$"), "12", 1.0),
        (Reward(kind="regex", pattern=r"^\d+$"), "a1", 0.0),
        (Reward(kind="length", least=3, most=5), "abcd", 0.0),
        (Reward(kind="length", least=3, most=5), "a", -2.0),
        (Reward(kind="length", least=3, most=5), "abcdefg", -2.0),
        (Reward(kind="length", least=3), "x" * 99, 0.0),
    ],
)
def test_rules(reward: Reward, answer: str, expected: float) -> None:
    reward.check()
    [found] = with_rewards([row(answer, reference="4"), {"where": "p.jsonl:2", "error": "too long"}], reward)
    assert found["reward"] == expected


@pytest.mark.parametrize(
    ("reward", "wrong"),
    [
        (Reward(kind="exact"), "reward = exact is neither exact_match, json, regex, length, nor the directory"),
        (Reward(kind="os:getpid"), "runs code of this machine. If you trust it, add allow_code=true"),
        (Reward(kind="regex"), "is no regular expression: it is empty"),
        (Reward(kind="regex", pattern="("), "is no regular expression: missing"),
        (Reward(kind="json", pattern="a"), "pattern has an effect with reward=regex only"),
        (Reward(kind="json", most=3), "most has an effect with reward=length only"),
        (Reward(kind="length"), "needs least=N or most=N"),
        (Reward(kind="length", least=5, most=3), "least no larger than most"),
    ],
)
def test_rewards_that_cannot_be(reward: Reward, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        reward.check()


def test_a_function_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text("def vowels(row):\n    return sum(c in 'aeiou' for c in row['answer'])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = Reward(kind="own_rewards:vowels", allow_code=True)
    reward.check()
    assert [one["reward"] for one in with_rewards([row("pear"), row("sky")], reward)] == [2.0, 0.0]
    with pytest.raises(ConfigError, match="has no attribute 'consonants'"):
        with_rewards([row("a")], Reward(kind="own_rewards:consonants", allow_code=True))
    with pytest.raises(DataError, match=r"p\.jsonl:1: reward=exact_match needs the right answer"):
        with_rewards([row("a")], Reward(kind="exact_match"))


def test_a_reward_model_scores_what_training_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import transformers

    from toolkit.models import chat, tokenizer_files

    write_random(tmp_path)
    tokenizer = tokenizer_files.load_tokenizer(str(tmp_path))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, **sizes)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = with_rewards([row("a"), row("a longer one")], Reward(kind=str(tmp_path)))
    for one in found:
        said = [*one["messages"], {"role": "assistant", "content": one["answer"]}]
        ids, _ = chat.chat_encoder(tokenizer).encode(said)
        expected = model(input_ids=torch.tensor([ids])).logits[0, 0].item()
        assert one["reward"] == pytest.approx(expected, abs=1e-5)
    assert found[0]["reward"] != found[1]["reward"]


def test_pairs_are_of_the_best_and_the_worst() -> None:
    rows = [row(answer, reward=value) for answer, value in (("b", 1.0), ("w", -1.0), ("m", 0.0), ("b2", 1.0))]
    rows += [row(answer, "p.jsonl:2", reward=1.0) for answer in ("x", "y")]
    rows += [row("", "p.jsonl:3", reward=-5.0), row("z", "p.jsonl:3", reward=2.0)]  # nothing can be learned of ""
    [pair], about = best_and_worst_pairs(rows)
    assert (pair["chosen"]["content"], pair["rejected"]["content"]) == ("b", "w")
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, -1.0)
    assert about == {"prompts": 3, "samples": 8, "mean_reward": 0.0, "best_reward": 4 / 3, "pairs": 1, "ties": 2}


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    rows = [row("a\u2028b\x85c"), row("d")]
    write_lines(tmp_path / "rows.jsonl", rows)
    assert read_lines(tmp_path / "rows.jsonl") == rows


class Steps:
    """Does what the commands of rounds would do, and notes it; stops at the step of number `stop`."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.devices: set[str] = set()
        self.servers: list[tuple[str | None, str | None]] = []
        self.stop = -1

    def __call__(self, command: list[str], requests: Any, device: str = "") -> None:
        if len(self.done) == self.stop:
            raise Stopped("stopped")
        self.devices |= {device} if "launch" not in command else set()
        words = dict(word.partition("=")[::2] for word in command)
        if "generate" in command:
            questions = read_lines(Path(words["input"]))
            answers = ["a" * (1 + place) for place in range(int(words["samples"]))]
            rows = [row(answer, f"p:{place}") for place, _ in enumerate(questions) for answer in answers]
            write_lines(Path(words["output"]), rows)
            self.servers.append((words.get("server"), words.get("timeout_s")))
            self.done.append(
                f"generate {Path(words['model.path']).parts[-3:]} {words.get('adapter', '')} "
                f"{words.get('model.chat_template', '')} {words['seed']}"
            )
        elif "export-model" in command:
            Path(words["output"]).mkdir()
            self.done.append(f"merge {command[command.index('export-model') + 1].rpartition('round')[2]}")
        elif "launch" in command:
            run = Path(words["run.dir"]) / words["run.name"]
            (run / "export").mkdir(parents=True)
            if words.get("tuning") == "lora":
                (run / "export" / "adapter_config.json").touch()
            (run / "metrics.jsonl").write_text('{"rewards/accuracies": 0.5}\n{"eval_rewards/accuracies": 0.75}\n')
            (run / "DONE").touch()
            assert len(read_lines(Path(words["data"]))) == 3
            self.done.append(f"launch {words['model.path'].rpartition('round')[2]}")
        else:
            spec = json.loads(command[-1])
            write_lines(Path(spec["output"]), with_rewards(read_lines(Path(spec["samples"])), Reward(**spec["reward"])))
            self.done.append("score")


def test_each_step_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However often it is stopped, the steps are those of one go; other arguments are refused."""
    steps = Steps()
    monkeypatch.setattr(rounds, "_run_process", steps)
    monkeypatch.setattr(rounds, "SignalRequests", lambda: None)
    write_lines(tmp_path / "p.jsonl", [{"prompt": f"question {number}"} for number in range(3)])
    (tmp_path / "model").mkdir()
    words = ["rounds", "recipe=zero1", "preference=dpo", f"model.path={tmp_path}/model", f"run.dir={tmp_path}/runs"]
    words += ["model.chat_template=glm_z1"]
    words += [f"prompts={tmp_path}/p.jsonl", "reward=length", "least=3", "rounds=2", "samples=3", "run.name=both"]
    for stop in range(8):
        steps.stop = stop
        assert main(words) == Stopped.exit_code
        assert len(steps.done) == stop
    steps.stop = -1
    assert main(words) == 0
    kinds = [one.split()[0] for one in steps.done]
    assert kinds == ["generate", "score", "launch"] * 2 + ["generate", "score"]
    assert steps.done[5].endswith("-1/run/export"), "the second round begins with the first one's export"
    assert len({one.split()[-1] for one in steps.done if one.startswith("generate")}) == 3, "each draws anew"
    asked = ["glm_z1" in one for one in steps.done if one.startswith("generate")]
    assert asked == [True, False, False], "what a run has saved has its template"
    found = json.loads((tmp_path / "runs" / "both" / "rounds.json").read_text())
    assert found["round-2"]["accuracy"] == 0.75 and found["round-2"]["pairs"] == 3
    assert found["result"]["mean_reward"] == -1.0
    assert main(words) == 0 and len(steps.done) == 8
    assert main([word.replace("rounds=2", "rounds=3") for word in words]) == 0
    assert [one.split()[0] for one in steps.done[8:]] == ["launch", "generate", "score"], "its answers are there"
    assert "'round-3', 'run', 'export'" in steps.done[9], "the result is the third round's"
    assert main(words) == 0 and len(steps.done) == 11
    capsys.readouterr()
    assert main([*words[:-3], "samples=4", "rounds=2", "run.name=both"]) == 2
    assert "were started with other settings (generate)" in capsys.readouterr().err
    assert main([*words, "data=x.jsonl"]) == 2
    assert "data=" in capsys.readouterr().err
    assert main([one.replace("preference=dpo", "preference=kto") for one in words]) == 2
    assert "preference=dpo" in capsys.readouterr().err
    assert main([*words, "min_reward=1"]) == 2
    assert "min_reward has an effect without a preference loss only" in capsys.readouterr().err


def test_without_a_preference_loss_the_best_answers_are_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps()
    monkeypatch.setattr(rounds, "_run_process", steps)
    monkeypatch.setattr(rounds, "SignalRequests", lambda: None)
    write_lines(tmp_path / "p.jsonl", [{"prompt": f"question {number}"} for number in range(3)])
    (tmp_path / "model").mkdir()
    words = ["rounds", "recipe=zero1", f"model.path={tmp_path}/model", f"run.dir={tmp_path}/runs", "rounds=1"]
    words += [f"prompts={tmp_path}/p.jsonl", "reward=length", "least=3", "samples=4"]
    assert main([*words, "run.name=best"]) == 0, capsys.readouterr().err
    assert "the best answer of each prompt" in capsys.readouterr().out
    learned = read_lines(tmp_path / "runs" / "best" / "round-1" / "best.jsonl")
    assert [one["messages"][-1] for one in learned] == [{"role": "assistant", "content": "aaa"}] * 3
    assert main([*words, "run.name=none", "min_reward=0.5"]) == 2
    assert "no answer has a reward of at least 0.5" in capsys.readouterr().err


def test_the_best_answer_must_be_good_enough() -> None:
    rows = [row(answer, reward=value) for answer, value in (("b", 1.0), ("w", -1.0), ("", 3.0))]
    rows += [row("x", "p.jsonl:2", reward=0.5, tools=["t"])]
    for least, answers in ((0.5, ["b", "x"]), (1.0, ["b"]), (2.0, [])):
        learned, about = best_answers(rows, least)
        assert [one["messages"][-1]["content"] for one in learned] == answers
        assert (about["pairs"], about["ties"]) == (len(answers), 2 - len(answers))
    assert best_answers(rows, 0.5)[0][1]["tools"] == ["t"]


def test_prompts_are_answered_by_a_process_for_each_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a step that are done are not started again; one more makes a file of theirs."""
    steps, started = Steps(), []
    monkeypatch.setattr(rounds, "_run_process", steps)
    monkeypatch.setattr(rounds, "_run_processes", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(rounds, "SignalRequests", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    write_lines(tmp_path / "p.jsonl", [{"prompt": f"question {number}"} for number in range(3)])
    (tmp_path / "model").mkdir()
    folder = tmp_path / "runs" / "some"
    words = ["rounds", "--num_gpus", "3", "recipe=zero1", "preference=dpo", f"model.path={tmp_path}/model"]
    words += [f"run.dir={tmp_path}/runs", f"prompts={tmp_path}/p.jsonl", "reward=length", "least=3", "run.name=some"]
    steps.stop = 0
    assert main([*words, "rounds=1"]) == Stopped.exit_code
    (folder / "round-1" / "samples.jsonl.2-of-3").touch()
    for name in ("1-of-2", "1-of-32.part.json"):  # of a command on other GPUs, which was stopped
        (folder / "round-1" / f"samples.jsonl.{name}").touch()
    steps.stop = -1
    assert main([*words, "rounds=1"]) == 0, capsys.readouterr().err
    shards = [([command[-1] for command in commands], devices) for commands, _, devices in started]
    seen = [{"CUDA_VISIBLE_DEVICES": name} for name in ("4", "5", "6")]
    everything = (["shard=1/3", "shard=2/3", "shard=3/3"], seen)
    assert shards == [everything, (["shard=1/3", "shard=3/3"], seen[::2]), everything]
    assert all(command[3] == "generate" for commands, *_ in started for command in commands)
    assert steps.devices == {"4", "4,5,6"}, "a reward may take them all"
    assert {path.name for path in (folder / "round-1").glob("*-of-*")} == {"samples.jsonl.2-of-3"}


def test_each_rounds_model_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its adapter merged. How it is served may change when the rounds are resumed, and a command gets all GPUs."""
    steps = Steps()
    monkeypatch.setattr(rounds, "_run_process", steps)
    monkeypatch.setattr(rounds, "SignalRequests", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    write_lines(tmp_path / "p.jsonl", [{"prompt": f"question {number}"} for number in range(3)])
    write_random(tmp_path / "model")
    words = ["rounds", "--num_gpus", "2", "recipe=zero1", "preference=dpo", "tuning=lora", "run.name=served"]
    words += [f"run.dir={tmp_path}/runs", f"prompts={tmp_path}/p.jsonl", "reward=length", "least=3", "rounds=2"]
    words += [f"model.path={tmp_path}/model", "model.name=babbler", "samples=3"]
    command = "env vllm serve {model} --port {port} --tensor-parallel-size 2"
    for stop, server in ((4, f"server={command}"), (99, "server=env other {model} {port}")):
        steps.stop = stop
        code = main([*words, server, "timeout_s=30"])
        assert code == (0 if stop == 99 else Stopped.exit_code), capsys.readouterr().err
    kinds = [one.split()[0] for one in steps.done]
    assert kinds == [*["generate", "score", "launch", "merge"] * 2, "generate", "score"]
    assert steps.done[3] == "merge -1/run/export" and "('served', 'round-2', 'merged')" in steps.done[4]
    assert steps.servers == [(command, "30"), *[("env other {model} {port}", "30")] * 2]
    assert steps.devices == {"0,1", ""} and not list(tmp_path.glob("runs/served/*/merged"))
    (tmp_path / "model" / "tokenizer_config.json").rename(tmp_path / "model" / "adapter_config.json")
    for wrong, message in (
        ("server=vlm", "server = vlm is neither one of auto, vllm"),
        ("timeout_s=3", "timeout_s has an effect with server= only"),
        ("server=transformers", "is an adapter, not a whole model"),
    ):
        assert main([*words, wrong]) == 2
        assert message in capsys.readouterr().err


def test_gpus_that_are_left_out_answer_no_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed takes the numbers of --include and --exclude as they are, whatever CUDA_VISIBLE_DEVICES is."""
    monkeypatch.setattr("toolkit.launch.deepspeed.hosts_of", lambda options: select_gpus({"localhost": 8}, options))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert cli._devices({"--include": "localhost:4,5"}) == ["4", "5"]
    assert cli._devices({"--exclude": "localhost:0,1,2,3,4,5,6"}) == ["7"]
    assert cli._devices({"--hostfile": "hosts", "--include": "a:4,5"}) == [""]


def test_a_step_that_fails_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        last, is_new = 0, False

    with pytest.raises(rounds.LaunchError, match=r"failed with exit code 3; .* Step: -c"):
        rounds._run_process([sys.executable, "-c", "raise SystemExit(3)"], Nothing())  # type: ignore[arg-type]
    killed = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(rounds.LaunchError, match=r"was killed by signal 9\. .* The same command resumes\. Step: -c"):
        rounds._run_process([sys.executable, "-c", killed], Nothing())  # type: ignore[arg-type]
