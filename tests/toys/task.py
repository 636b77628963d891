"""A task: several labels, each of which holds for an image or does not.  Its files lie in the folder ``multilabel``."""

from pathlib import Path

NAME = "multilabel"

_FILES = Path(__file__).with_name(NAME)

EDITS = {
    "psc_core/tasks/__init__.py": [('    "classification",\n', '    "multilabel",\n    "classification",\n')],
    **{
        file.relative_to(_FILES).as_posix(): [("", file.read_text())]
        for floor in ("psc_core", "app")
        for file in (_FILES / floor).rglob("*")
        if file.suffix in (".py", ".jinja")
    },
    "app/http/page/tasks.js": [
        (
            "export const TASKS = { classification, regression };",
            """const multilabel = {
  threshold: "max_undecided",
  thresholdName: "Undecided with more undecided labels than",
  abstention: "abstain_undecided",
  unsure: "undecided",
  uncertainty: ({ undecided }) => undecided.length,
  limit: (policy) => policy.max_undecided,
  isOff: (limit, highest) => limit >= highest,
  lowest: 0,
  off: (highest) => highest,
  limitText: number,
  value: ({ labels }) => labels.join(" "),
  summary: ({ classes }) => `${classes.length} labels`,
  axis: ({ classes }) => ({ highest: classes.length, title: "↑ more undecided labels" }),

  answer: ({ labels }, decision) => (decision === "accept" ? list(labels) : `guess: ${list(labels)}`),
  rows: ({ labels, undecided }) => [["Labels", list(labels), ""], ["Undecided", list(undecided), ""]],
  bars: classification.bars,
  reason: ({ undecided }) => `${list(undecided)} may hold or not`,
  evidence: () => [],
  nearest: "Nearest labels",
  kept: ({ label }) => label,

  handed: () => ({ fraction: 0, rest: "" }),

  field: "input",
  guess: ({ label }) => label,
  choices: () => [],
  verdict: (text) => text,
};

export const TASKS = { classification, regression, multilabel };""",
        )
    ],
    "docs/service.md": [
        (
            "\n## Clients\n",
            """
A multi-label model answers with `labels` (those that hold), `undecided` (those that may as well be the other way),
the `probabilities` of all, `entropy` (nats, of the least certain label), and the fields that all answers have.

## Clients
""",
        )
    ],
    "docs/bundle-format.md": [
        (
            "\n### Information\n",
            """
### Multi-label

A bundle with `task` = `multilabel` gives each label a probability of its own; K is the number of labels.
`policy.max_undecided` (integer ≥ 0) is in place of `ambiguity_threshold`. Of the head `logistic`, `head.sizes` has
`dim` = D and `labels` = K.

| tensor of logistic | shape | meaning |
| --- | --- | --- |
| `center`, `inverse_scale` | (D) | as at [Head](#head) |
| `weight`, `bias` | (K, D), (K) | of the logits |

    probabilities = 1 / (1 + exp(−W φ − b));   epistemic = ‖ φ ‖² / D

| tensor of the calibration | type, shape | meaning |
| --- | --- | --- |
| `ood_scores` | float32 (n) | ood_score, ascending |
| `misses` | float32 (n) | 1 minus the probability of the true value of the label that is told worst, ascending |

    possible = 1 − misses[⌈(n + 1) · coverage⌉ − 1];   a label is undecided ⇔ min(p, 1 − p) ≥ possible

### Information
""",
        )
    ],
    "tests/tasks.py": [
        (
            "ONE_OF_EACH: dict[str, tuple[Task, BaseThresholds]] = {\n",
            """ONE_OF_EACH: dict[str, tuple[Task, BaseThresholds]] = {
    "multilabel": (
        Multilabel(),
        multilabel.Thresholds(MultilabelPolicy(alpha=0.05, max_undecided=0, coverage=0.9), 0.05, 0.3),
    ),
""",
        ),
        (
            "from psc_core.tasks.outputs import FloatArray, Outputs\n",
            """from psc_core.tasks.multilabel import decide as multilabel
from psc_core.tasks.multilabel.policy import MultilabelPolicy
from psc_core.tasks.multilabel.task import Multilabel
from psc_core.tasks.outputs import FloatArray, Outputs
""",
        ),
    ],
}

PROGRAM = (_FILES / "use.py").read_text()
