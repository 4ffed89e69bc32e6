"""The paper's evaluation as data (`festina paper`): what each figure plays, and its numbers beside ours."""
