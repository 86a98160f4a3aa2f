from apex import amp
def backward(loss, opt):
    with amp.scale_loss(loss, opt) as scaled_loss:
        scaled_loss.backward()
