"""The loss scales of a session's first group, by loss id."""


def rows(amp):
    """Return what is saved of each loss."""
    return {row["loss_id"]: row for row in amp.state_dict()["groups"][0]["losses"]}


def scales(amp):
    """Return the scale of each loss."""
    return {loss_id: row["scale"] for loss_id, row in rows(amp).items()}


def set_scale(amp, loss_id, scale):
    """Give one loss a scale, by loading a state."""
    state = amp.state_dict()
    losses = state["groups"][0]["losses"]
    losses[:] = [row for row in losses if row["loss_id"] != loss_id] + [
        {**losses[0], "loss_id": loss_id, "scale": scale}
    ]
    amp.load_state_dict(state)
