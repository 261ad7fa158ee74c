"""`redline race`."""

from __future__ import annotations

from redline.cli.options import (
    ISOLATED,
    WORKLOAD,
    Exit,
    Given,
    Json,
    Models,
    Recipes,
    Replicates,
    TrialEffort,
    only_set,
    print_json,
    takes,
)


@takes(WORKLOAD | ISOLATED)
def race(
    *,
    model: Models = None,
    recipe: Recipes = None,
    replicates: Replicates = 3,
    given: Given,
    effort: TrialEffort = "quick",
    json: Json = False,
) -> int:
    """Decide which recipe, or which of your functions, is faster: fresh processes measured interleaved, until every pair is decided.

    Verdicts are faster, slower, same (within 3 %) or inconclusive. The interval covers differences between processes.
    A recipe raced against itself (-r A -r A) shows the noise floor of the machine.

    \b
    Examples:
      redline race resnet50 --batch 32 -r fp16 -r fp16+channels-last
      redline race resnet50 -r compile -r compile:max-autotune --replicates 5
      redline race steps.py:old_step steps.py:new_step
    """
    from redline.api.race import race as race_recipes
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveRace
    from redline.model.fields import MOST_REPLICATES, require_range
    from redline.report.terminal import make_console

    require_range("replicates", replicates, 1, MOST_REPLICATES)
    with LiveRace() as observer, Workspace(observer=observer) as workspace:
        result = race_recipes(
            model or [],
            recipes=recipe or [],
            replicates=replicates,
            **given,
            **only_set(effort=effort),
            workspace=workspace,
        )
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(result.report())
    return Exit.FAILED_ROW if any(record.failure for record in result.records) else Exit.DONE
