"""One model on several processes: tensor and pipeline parallel ranks behind one executor."""
