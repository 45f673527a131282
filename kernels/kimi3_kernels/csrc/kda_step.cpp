// One KDA decode step, reading and writing the state once (spec section 4, "KDA").
//
// Per row and head, with D = diag(exp(g)) over K:
//   read  = (D k)^T S and (D q)^T S in one pass over S [K, V]
//   u     = beta * (v - (D k)^T S)
//   o     = scale * ((D q)^T S + (q . k) u)
//   S    <- D S + k u^T in a second pass, while the 4*K*V bytes of the head are still in the core's cache.
//
// Shapes: N = B*H heads in all, K key dim, V value dim. All tensors contiguous float32.

#include <ATen/Parallel.h>
#include <torch/extension.h>

#include <cmath>
#include <vector>

namespace {

void step_head(const float* q, const float* k, const float* v, const float* g, float beta, float* state, float* out,
               int64_t K, int64_t V, float scale, float* scratch) {
  float* from_k = scratch;
  float* from_q = scratch + V;
  float* decay = scratch + 2 * V;
  std::fill(scratch, scratch + 2 * V, 0.0f);
  float qk = 0.0f;
  for (int64_t i = 0; i < K; ++i) {
    decay[i] = std::exp(g[i]);
    qk += q[i] * k[i];
    const float dk = decay[i] * k[i], dq = decay[i] * q[i];
    const float* row = state + i * V;
#pragma omp simd
    for (int64_t j = 0; j < V; ++j) {
      from_k[j] += dk * row[j];
      from_q[j] += dq * row[j];
    }
  }
#pragma omp simd
  for (int64_t j = 0; j < V; ++j) {
    const float u = beta * (v[j] - from_k[j]);
    from_k[j] = u;
    out[j] = scale * (from_q[j] + qk * u);
  }
  for (int64_t i = 0; i < K; ++i) {
    float* row = state + i * V;
    const float d = decay[i], ki = k[i];
#pragma omp simd
    for (int64_t j = 0; j < V; ++j) row[j] = d * row[j] + ki * from_k[j];
  }
}

at::Tensor kda_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                    const at::Tensor& beta, at::Tensor state, double scale) {
  const int64_t heads = q.size(0) * q.size(1), K = q.size(2), V = v.size(2);
  for (const at::Tensor* t : {&q, &k, &v, &g, &beta, const_cast<const at::Tensor*>(&state)})
    TORCH_CHECK(t->is_contiguous() && t->scalar_type() == at::kFloat, "kda_step takes contiguous float32 tensors");
  at::Tensor out = at::empty_like(v);
  const float *qp = q.data_ptr<float>(), *kp = k.data_ptr<float>(), *vp = v.data_ptr<float>();
  const float *gp = g.data_ptr<float>(), *bp = beta.data_ptr<float>();
  float *sp = state.data_ptr<float>(), *op = out.data_ptr<float>();
  at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(2 * V + K);
    for (int64_t n = begin; n < end; ++n)
      step_head(qp + n * K, kp + n * K, vp + n * V, gp + n * K, bp[n], sp + n * K * V, op + n * V, K, V,
                static_cast<float>(scale), scratch.data());
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(kimi3_native, m) {
  m.def("kda_step(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(kimi3_native, CPU, m) { m.impl("kda_step", kda_step); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}
