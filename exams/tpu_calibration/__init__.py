"""What a real TPU computes of small programs, recorded in one file, and held against what is predicted of it.

python -m exams.tpu_calibration.record tpu.npz           # on a machine with a TPU; send the file
python -m exams.tpu_calibration.compare tpu.npz          # anywhere with libtpu
"""
