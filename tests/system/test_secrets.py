"""No secret of the environment or the config is in any file of a run, nor in anything that it says."""

import json
import sys
from pathlib import Path

import pytest
from ranks import REPOSITORY, free_port, run
from shared import faulty_words, losses

LAUNCH = [sys.executable, str(REPOSITORY / "tests" / "ranks" / "faulty_launch.py"), "--num_gpus", "2"]
ENVIRONMENT = {
    "HF_TOKEN": "first-token-31415",
    "SOME_API_KEY": "key'with\"quotes-2718",
    "DB_PASSWORD": "wörd-of-passing",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENG",
    "CLOUD_CREDENTIALS": "cred-0987654321",
}
IN_CONFIG = ["comet-private-1618", "me:url-password", "sk-abcdefghijklmnop9999", "query-token-5772"]


def recipe(folder: Path, token: str) -> str:
    """Write a recipe full of secrets: by their key, in a URL, in the form of a key, and the environment's."""
    path = folder / "secretive.yaml"
    values = {
        "defaults": ["quickstart"],
        "model": {
            "hub_id": f"owner/{token}",
            "modelscope_id": f"https://{IN_CONFIG[1]}@host/{IN_CONFIG[2]}?access_token={IN_CONFIG[3]}",
        },
        "ds_extra": {"comet": {"enabled": False, "api_key": IN_CONFIG[0], "project": ENVIRONMENT["SOME_API_KEY"]}},
        "evaluate": {"prompts": [ENVIRONMENT["DB_PASSWORD"]], "max_new_tokens": 2},
    }
    path.write_text(json.dumps(values))
    return f"recipe={path}"


@pytest.mark.ranks
@pytest.mark.fault("S4")
def test_secrets_stay_where_they_are(rows_file: Path, tmp_path: Path) -> None:
    fault = {"at": "each life", "step": 5, "rank": 1, "do": "tell", "note": str(tmp_path / "note"), "once": True}
    words = [
        word for word in faulty_words(rows_file, tmp_path, "run") if not word.startswith(("recipe=", "evaluate.p"))
    ]
    words += ["profile.dump_state=true", "evaluate.prompts=[sk-abcdefghijklmnop9999]"]

    def launched(token: str) -> str:
        command = [*LAUNCH, "--master_port", str(free_port()), recipe(tmp_path, token), *words]
        told = json.dumps({**fault, "tell": token})
        finished = run(command, cwd=tmp_path, **{**ENVIRONMENT, "HF_TOKEN": token, "FAULT": told})
        folder = tmp_path / "runs" / "run"
        if token == ENVIRONMENT["HF_TOKEN"]:
            assert finished.code == 1
            assert "RuntimeError (rank 1 on " in finished.output
            assert "): ***" in (folder / "FAILED").read_text()
        else:  # another token is no other run
            assert finished.code == 0, finished.output[-3000:]
            assert "Resuming after step " in finished.output
        return finished.output

    output = launched(ENVIRONMENT["HF_TOKEN"]) + launched("second-token-92653")
    folder = tmp_path / "runs" / "run"
    assert (tmp_path / "note").exists()
    assert len(losses(folder)) == 8
    assert "hub_id: owner/***" in (folder / "config.yaml").read_text()
    assert json.loads((folder / "ds_config.json").read_text())["comet"]["api_key"] == "***"
    assert "comet" in (folder / "logs" / "rank_0.log").read_text(), "DeepSpeed writes its config there"
    secrets = [*ENVIRONMENT.values(), *IN_CONFIG, "url-password", "second-token-92653"]
    forms = {form for secret in secrets for form in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1])}
    assert [form for form in forms if form in output] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "secretive.yaml"]
    assert len(files) > 30
    found = [
        (path, form) for path in files for content in [path.read_bytes()] for form in forms if form.encode() in content
    ]
    assert found == []
