"""Running a subject with taps and recording what they see."""
