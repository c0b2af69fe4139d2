"""Upload an exported model or adapter to Hugging Face or ModelScope.

toolkit push PATH hub=OWNER/NAME [private=true] [license=ID] [--yes]

  PATH              a run directory, whose export/ is uploaded, or a directory with a model or an adapter
  hub=OWNER/NAME    a repository on Hugging Face; modelscope:OWNER/NAME on ModelScope (needs `pip install modelscope`).
                    It is created if it does not exist
  private=true      visibility of a repository that is created; false publishes it
  license=ID        licence in the model card, such as apache-2.0; the base model's licence binds you
  --yes             upload; without it the files are listed, and nothing is sent

All files of the directory are uploaded in one commit, with the model card README.md: look through it first, it names
data and settings. Scores of `toolkit eval` on the run are added to the card. Interrupted uploads continue with the same
command. The token comes from HF_TOKEN (`hf auth login`) or MODELSCOPE_API_TOKEN (`modelscope login`), and is never
printed.
"""

from pathlib import Path

from toolkit.command_line import named_arguments, one_of
from toolkit.messages import ConfigError, tr

_USAGE = "toolkit push PATH hub=OWNER/NAME"


def run(words: list[str]) -> None:
    """List a model's files and, with --yes, upload them."""
    is_confirmed = "--yes" in words
    arguments = named_arguments(
        [word for word in words if word != "--yes"],
        required=("path", "hub"),
        optional=("private", "license"),
        usage=_USAGE,
        bare="path",
    )
    private = one_of(arguments, "private", ("true", "false")) == "true"
    license_id = arguments.get("license", "")
    if license_id and not license_id.replace("-", "").replace(".", "").isalnum():
        raise ConfigError("license = {value} is no identifier such as apache-2.0.", value=license_id)
    from toolkit.extras import push

    target, folder = push.parse_target(arguments["hub"]), push.exported_folder(Path(arguments["path"]))
    sizes = {path: path.stat().st_size for path in push.uploaded_files(folder)}
    for path, size in sizes.items():
        print(f"  {size / 1e6:12,.3f} MB  {path.relative_to(folder)}")
    total = f"{sum(sizes.values()) / 1e9:,.2f}"
    print(
        tr(
            "{count} files, {total} GB, from {folder} to {hub}:{repository}.",
            count=len(sizes),
            total=total,
            folder=folder,
            hub=target.hub,
            repository=target.repository,
        )
    )
    run = push.run_of(folder)
    scores = "" if run is None else push.scores_section(run)
    if scores:
        print(tr("The scores of `toolkit eval` are added to the model card."), scores, sep="\n\n")
    if not license_id:
        print(tr("No licence is named: license=ID puts it into the model card."))
        if run is not None and (base := push.base_license(run)):
            print(tr("The base model's is {license}.", license=base))
    if not is_confirmed:
        print(tr("Nothing was sent. To upload, add --yes"))
        return
    url = push.upload(target, folder, private=private, license_id=license_id, scores=scores)
    print(tr("Uploaded: {url}", url=url))
