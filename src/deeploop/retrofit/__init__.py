"""A pretrained model as a looped GPT: read it, choose its layers, write a run to go on from."""
