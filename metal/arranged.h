// Vectors whose dims are put in another order as they are read.
#include "tq_compat.h"

template <class Vector, class Dims>
struct tq_arranged {
  Vector vector;
  Dims dims;
  TQ_FN auto operator[](int dim) const { return vector[dims[dim]]; }
};
template <class Vector, class Dims>
TQ_FN tq_arranged<Vector, Dims> tq_arrange(Vector vector, Dims dims) { return {vector, dims}; }

// The order that changes nothing.
struct tq_same_dims {
  TQ_FN int operator[](int dim) const { return dim; }
};
