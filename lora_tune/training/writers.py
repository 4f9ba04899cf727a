# SPDX-License-Identifier: Apache-2.0
"""Other places that the rows of `metrics.jsonl` go to: Weights & Biases and TensorBoard."""

from pathlib import Path

from lora_tune.errors import InputError
from lora_tune.hf.folder import replace_file
from lora_tune.training.metrics import Row, Writer

NAMES = ("wandb", "tensorboard")


def make_writer(
    name: str, run_dir: Path, *, project: str, mode: str, config: Row, resume_step: int | None
) -> Writer:
    """The writer of a name in `NAMES`; the packages behind it are imported here, and only here.

    Args:
      name: which one.
      run_dir: the run folder, where both keep their files.
      project, mode: of wandb.
      config: the resolved recipe as plain values, for wandb.
      resume_step: the step that the run goes on from, None for a new one.

    Raises:
      InputError: its package is not installed.
    """
    if name == "wandb":
        return Wandb(run_dir, project=project, config=config, mode=mode)
    return TensorBoard(run_dir / "tensorboard", resume_step=resume_step)


class Wandb:
    """Repeats the rows to Weights & Biases; a run that goes on keeps its id.

    Args:
      run_dir: the run folder; wandb keeps its files in it.
      project: the wandb project.
      config: the resolved recipe as plain values.
      mode: `offline` writes files that `wandb sync` can send later; `online` sends at once, with
        the login that wandb itself finds.

    Raises:
      InputError: wandb does not start, as without a login or a connection.
    """

    def __init__(
        self, run_dir: Path | str, *, project: str, config: Row, mode: str = "offline"
    ) -> None:
        import wandb

        folder = Path(run_dir).absolute()
        self._table = wandb.Table
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=_run_id(folder),
                resume="allow" if mode == "online" else None,
                dir=str(folder),
                config=dict(config),
                mode=mode,  # pyright: ignore[reportArgumentType]
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    save_code=False,
                    disable_git=True,
                    x_disable_stats=True,
                ),
            )
        except wandb.Error as error:
            raise InputError(
                f"log.report_to: wandb does not start ({str(error).strip() or type(error).__name__}"
                "); see `wandb login` and log.wandb_project, or set log.wandb_mode=offline"
            ) from error

    def write(self, row: Row) -> None:
        """Logs one row under its step; two rows of one step are joined by wandb."""
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        if samples := values.get("samples"):
            values["samples"] = self._table(
                columns=list(samples[0]), data=[list(sample.values()) for sample in samples]
            )
        self._run.log(values, step=row["step"])

    def note(self, sentence: str) -> None:
        """Sentences are for the terminal only."""

    def close(self) -> None:
        """Finishes the wandb run."""
        self._run.finish()


class TensorBoard:
    """Repeats the rows as event files of TensorBoard: numbers as scalars, samples as texts.

    Args:
      folder: of the event files; a run that goes on adds a file.
      resume_step: events of later steps, which the run will write again, are taken back.

    Raises:
      InputError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path | str, *, resume_step: int | None = None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise InputError(
                "log.report_to: tensorboard needs the package tensorboardX; "
                "pip install 'lora-tune[tensorboard]', or take it out of log.report_to"
            ) from None
        purge = None if resume_step is None else resume_step + 1
        # The name of a file has the second in it, which two starts may share.
        suffix = f".after-{resume_step or 0}"
        self._writer = SummaryWriter(str(folder), purge_step=purge, filename_suffix=suffix)

    def write(self, row: Row) -> None:
        """Writes one row under its step; it is on disk before this returns."""
        step = row["step"]
        for key, value in row.items():
            if isinstance(value, int | float) and key != "step":
                group = "eval" if key.startswith("eval_") else "train"
                self._writer.add_scalar(f"{group}/{key.removeprefix('eval_')}", value, step)
        for number, sample in enumerate(row.get("samples", ())):
            text = "\n\n".join(f"{name}: {said}" for name, said in sample.items())
            self._writer.add_text(f"samples/{number}", text, step)
        self._writer.flush()

    def note(self, sentence: str) -> None:
        """Sentences are for the terminal only."""

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def _run_id(folder: Path) -> str:
    """A wandb id that is made once per run folder and kept in it."""
    import uuid

    path = folder / "wandb" / "lora_tune_run_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, uuid.uuid4().hex[:16])
    return path.read_text(encoding="utf-8").strip()
