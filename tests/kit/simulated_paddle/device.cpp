// A device "gpu" for a CPU build of PaddlePaddle: a custom device whose memory is the host's, with kernels in float16
// and bfloat16.
//
// Paddle itself does the rest as on a GPU: it casts tensors of the device by its lists, and looks kernels up by device
// and dtype. Float32 it computes by the kernels of the CPU, which it falls back to. A kernel in low precision is the
// CPU's kernel in float32, whose arguments are widened and whose results are rounded.
#include "paddle/phi/backends/all_context.h"
#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/backends/device_ext.h"
#include "paddle/phi/core/kernel_registry.h"

#include "paddle/phi/kernels/abs_grad_kernel.h"
#include "paddle/phi/kernels/abs_kernel.h"
#include "paddle/phi/kernels/activation_grad_kernel.h"
#include "paddle/phi/kernels/activation_kernel.h"
#include "paddle/phi/kernels/adam_kernel.h"
#include "paddle/phi/kernels/adamw_kernel.h"
#include "paddle/phi/kernels/add_n_kernel.h"
#include "paddle/phi/kernels/addmm_grad_kernel.h"
#include "paddle/phi/kernels/addmm_kernel.h"
#include "paddle/phi/kernels/amp_kernel.h"
#include "paddle/phi/kernels/arg_min_max_kernel.h"
#include "paddle/phi/kernels/batch_norm_grad_kernel.h"
#include "paddle/phi/kernels/batch_norm_kernel.h"
#include "paddle/phi/kernels/bmm_grad_kernel.h"
#include "paddle/phi/kernels/bmm_kernel.h"
#include "paddle/phi/kernels/cast_kernel.h"
#include "paddle/phi/kernels/clip_grad_kernel.h"
#include "paddle/phi/kernels/clip_kernel.h"
#include "paddle/phi/kernels/compare_kernel.h"
#include "paddle/phi/kernels/concat_grad_kernel.h"
#include "paddle/phi/kernels/concat_kernel.h"
#include "paddle/phi/kernels/conv_grad_kernel.h"
#include "paddle/phi/kernels/conv_kernel.h"
#include "paddle/phi/kernels/cross_entropy_grad_kernel.h"
#include "paddle/phi/kernels/cross_entropy_kernel.h"
#include "paddle/phi/kernels/dropout_grad_kernel.h"
#include "paddle/phi/kernels/dropout_kernel.h"
#include "paddle/phi/kernels/elementwise_add_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_add_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_kernel.h"
#include "paddle/phi/kernels/elementwise_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_kernel.h"
#include "paddle/phi/kernels/embedding_grad_kernel.h"
#include "paddle/phi/kernels/embedding_kernel.h"
#include "paddle/phi/kernels/expand_grad_kernel.h"
#include "paddle/phi/kernels/expand_kernel.h"
#include "paddle/phi/kernels/fill_kernel.h"
#include "paddle/phi/kernels/gather_grad_kernel.h"
#include "paddle/phi/kernels/gather_kernel.h"
#include "paddle/phi/kernels/gelu_grad_kernel.h"
#include "paddle/phi/kernels/gelu_kernel.h"
#include "paddle/phi/kernels/group_norm_grad_kernel.h"
#include "paddle/phi/kernels/group_norm_kernel.h"
#include "paddle/phi/kernels/isfinite_kernel.h"
#include "paddle/phi/kernels/layer_norm_grad_kernel.h"
#include "paddle/phi/kernels/layer_norm_kernel.h"
#include "paddle/phi/kernels/linear_v2_kernel.h"
#include "paddle/phi/kernels/log_softmax_grad_kernel.h"
#include "paddle/phi/kernels/log_softmax_kernel.h"
#include "paddle/phi/kernels/matmul_grad_kernel.h"
#include "paddle/phi/kernels/matmul_kernel.h"
#include "paddle/phi/kernels/mean_all_grad_kernel.h"
#include "paddle/phi/kernels/mean_all_kernel.h"
#include "paddle/phi/kernels/momentum_kernel.h"
#include "paddle/phi/kernels/p_norm_grad_kernel.h"
#include "paddle/phi/kernels/p_norm_kernel.h"
#include "paddle/phi/kernels/pool_grad_kernel.h"
#include "paddle/phi/kernels/pool_kernel.h"
#include "paddle/phi/kernels/reduce_max_grad_kernel.h"
#include "paddle/phi/kernels/reduce_max_kernel.h"
#include "paddle/phi/kernels/reduce_mean_grad_kernel.h"
#include "paddle/phi/kernels/reduce_mean_kernel.h"
#include "paddle/phi/kernels/reduce_min_kernel.h"
#include "paddle/phi/kernels/reduce_sum_grad_kernel.h"
#include "paddle/phi/kernels/reduce_sum_kernel.h"
#include "paddle/phi/kernels/rmsprop_kernel.h"
#include "paddle/phi/kernels/rnn_grad_kernel.h"
#include "paddle/phi/kernels/rnn_kernel.h"
#include "paddle/phi/kernels/scale_kernel.h"
#include "paddle/phi/kernels/selected_rows/adam_kernel.h"
#include "paddle/phi/kernels/selected_rows/adamw_kernel.h"
#include "paddle/phi/kernels/selected_rows/merge_selected_rows_kernel.h"
#include "paddle/phi/kernels/sgd_kernel.h"
#include "paddle/phi/kernels/softmax_grad_kernel.h"
#include "paddle/phi/kernels/softmax_kernel.h"
#include "paddle/phi/kernels/squared_l2_norm_grad_kernel.h"
#include "paddle/phi/kernels/squared_l2_norm_kernel.h"
#include "paddle/phi/kernels/where_grad_kernel.h"
#include "paddle/phi/kernels/where_kernel.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>
#include <stdexcept>
#include <thread>

namespace phi {

// Its header needs Eigen, which the wheel has not.
template <typename T, typename Context>
void LinearV2GradKernel(
    const Context&, const DenseTensor& input, const DenseTensor& weight, const DenseTensor& bias,
    const DenseTensor& out_grad, bool transpose_weight, DenseTensor* input_grad, DenseTensor* weight_grad,
    DenseTensor* bias_grad);

}  // namespace phi

namespace {

using phi::DataType;
using phi::DenseTensor;

char device_type[] = "gpu";
char device_model[] = "simulated";

// -- rounding ---------------------------------------------------------------------------------------------
// To the nearest, ties to even, as a GPU does it. Paddle's own conversions for CPUs cut bfloat16 off.

bool is_low(DataType dtype) {
  return dtype == DataType::FLOAT16 || dtype == DataType::BFLOAT16;
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float widened(const void* values, int64_t place, DataType dtype) {
  if (dtype == DataType::FLOAT32) {
    return static_cast<const float*>(values)[place];
  }
  uint32_t low = static_cast<const uint16_t*>(values)[place];
  if (dtype == DataType::BFLOAT16) {
    return from_bits(low << 16);
  }
  uint32_t sign = (low & 0x8000) << 16, magnitude = low & 0x7fff;
  if (magnitude < 0x400) {  // subnormal
    return std::copysign(magnitude * 0x1p-24f, from_bits(sign));
  }
  return from_bits(sign | ((magnitude << 13) + (magnitude < 0x7c00 ? 0x38000000 : 0x70000000)));
}

void round_into(void* values, int64_t place, DataType dtype, float wide) {
  if (dtype == DataType::FLOAT32) {
    static_cast<float*>(values)[place] = wide;
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &wide, sizeof(bits));
  uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff, low;
  if (std::isnan(wide)) {
    low = dtype == DataType::FLOAT16 ? 0x7e00 : 0x7fc0;
  } else if (dtype == DataType::BFLOAT16) {
    low = (magnitude + 0x7fff + ((magnitude >> 16) & 1)) >> 16;
  } else if (magnitude >= 0x477ff000) {  // 65520, which is no longer rounded to 65504
    low = 0x7c00;
  } else if (magnitude < 0x38800000) {  // subnormal
    low = std::lrint(std::abs(wide) * 0x1p24f);
  } else {
    low = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  static_cast<uint16_t*>(values)[place] = static_cast<uint16_t>(sign | low);
}

// -- one call of a kernel -----------------------------------------------------------------------------------

// Each tensor of the device has one of the host that stands for it.
class Call {
 public:
  explicit Call(const phi::CustomContext& device)
      : device_(device), host_(*static_cast<const phi::CPUContext*>(phi::DeviceContextPool::Instance().Get(phi::CPUPlace()))) {}

  const phi::CPUContext& host() const { return host_; }

  DenseTensor* input(const DenseTensor* tensor) {
    if (tensor == nullptr || !tensor->initialized()) {
      return const_cast<DenseTensor*>(tensor);
    }
    const Pair* shared = nullptr;
    for (Pair& pair : pairs_) {
      if (pair.tensor == tensor) {
        return &pair.host;
      }
      if (pair.data == tensor->data() && pair.dtype == tensor->dtype() && pair.dims == tensor->dims()) {
        shared = &pair;
      }
    }
    // Kernels ask whether two tensors share their memory, and whether they are the same.
    pairs_.push_back({tensor, tensor->data(), tensor->dtype(), tensor->dims(), shared ? shared->host : DenseTensor()});
    if (!shared) {
      to_host(*tensor, &pairs_.back().host);
    }
    return &pairs_.back().host;
  }

  DenseTensor* output(DenseTensor* tensor) {
    missing_ = tensor == nullptr;
    if (missing_) {
      return nullptr;
    }
    DenseTensor* host = nullptr;
    if (tensor->initialized()) {  // written in place, perhaps
      host = input(tensor);
    } else {
      pairs_.push_back({tensor, nullptr, DataType::UNDEFINED, {}, DenseTensor()});
      host = &pairs_.back().host;
      if (tensor->meta().valid()) {
        host->set_meta(tensor->meta());
      }
      if (is_low(tensor->dtype())) {
        host->set_type(DataType::FLOAT32);
      }
    }
    results_.push_back({tensor, tensor->dtype(), host});
    return host;
  }

  phi::SelectedRows* rows(const phi::SelectedRows* rows) {
    rows_.emplace_back(rows->rows(), rows->height());
    *rows_.back().mutable_value() = *input(&rows->value());
    return &rows_.back();
  }

  phi::SelectedRows* rows_out(phi::SelectedRows* rows) {
    if (rows == nullptr) {
      return nullptr;
    }
    rows_.emplace_back();
    rows_.back().mutable_value()->set_meta(rows->value().meta());
    rows_.back().mutable_value()->set_type(DataType::FLOAT32);
    row_results_.push_back({rows, rows->value().dtype(), &rows_.back()});
    return &rows_.back();
  }

  // An optimizer's kernel for GPUs computes with the master copy, and rounds it into the parameter. Both are found by
  // their places among the outputs: first and last.
  void compute_with_master() {
    master_ = !missing_ && results_.size() > 1 && results_.front().tensor != nullptr && is_low(results_.front().dtype) &&
              results_.back().dtype == DataType::FLOAT32 && results_.back().tensor->dims() == results_.front().tensor->dims();
    if (master_) {
      copy(*results_.back().host, results_.front().host);
    }
  }

  void finish() {
    if (master_) {
      copy(*results_.front().host, results_.back().host);
    }
    for (Result& result : results_) {
      if (result.host->initialized()) {
        to_device(*result.host, result.tensor, result.dtype);
      }
    }
    for (auto& result : row_results_) {
      result.rows->set_rows(result.host->rows());
      result.rows->set_height(result.host->height());
      to_device(result.host->value(), result.rows->mutable_value(), result.dtype);
    }
  }

 private:
  struct Pair {
    const DenseTensor* tensor;
    const void* data;
    DataType dtype;
    phi::DDim dims;
    DenseTensor host;
  };
  struct Result {
    DenseTensor* tensor;
    DataType dtype;
    DenseTensor* host;
  };
  struct RowResult {
    phi::SelectedRows* rows;
    DataType dtype;
    phi::SelectedRows* host;
  };

  void to_host(const DenseTensor& from, DenseTensor* to) const {
    to->Resize(from.dims());
    if (!is_low(from.dtype())) {
      host_.Alloc(to, from.dtype());
      std::memcpy(to->data(), from.data(), from.numel() * phi::SizeOf(from.dtype()));
      return;
    }
    host_.Alloc(to, DataType::FLOAT32);
    for (int64_t place = 0; place < from.numel(); ++place) {
      to->data<float>()[place] = widened(from.data(), place, from.dtype());
    }
  }

  void to_device(const DenseTensor& from, DenseTensor* to, DataType dtype) const {
    if (!is_low(dtype)) {
      dtype = from.dtype();
    }
    to->Resize(from.dims());
    device_.Alloc(to, dtype);
    if (from.dtype() == dtype) {
      std::memcpy(to->data(), from.data(), from.numel() * phi::SizeOf(dtype));
      return;
    }
    for (int64_t place = 0; place < from.numel(); ++place) {
      round_into(to->data(), place, dtype, from.data<float>()[place]);
    }
  }

  void copy(const DenseTensor& from, DenseTensor* to) const {
    to->Resize(from.dims());
    host_.Alloc(to, from.dtype());
    std::memcpy(to->data(), from.data(), from.numel() * phi::SizeOf(from.dtype()));
  }

  const phi::CustomContext& device_;
  const phi::CPUContext& host_;
  std::deque<Pair> pairs_;  // whose members do not move
  std::deque<phi::SelectedRows> rows_;
  std::vector<Result> results_;
  std::vector<RowResult> row_results_;
  bool master_ = false;
  bool missing_ = false;  // the last output is, which would be the master
};

// -- arguments ----------------------------------------------------------------------------------------------

template <typename T>
T&& on_host(Call&, T&& argument, phi::TypeTag<T>) {
  return std::forward<T>(argument);
}

DataType on_host(Call&, DataType dtype, phi::TypeTag<DataType>) {
  return is_low(dtype) ? DataType::FLOAT32 : dtype;
}

const DenseTensor& on_host(Call& call, const DenseTensor& tensor, phi::TypeTag<const DenseTensor&>) {
  return *call.input(&tensor);
}

using Optional = paddle::optional<DenseTensor>;
Optional on_host(Call& call, const Optional& tensor, phi::TypeTag<const Optional&>) {
  return tensor ? Optional(*call.input(tensor.get_ptr())) : Optional();
}

using List = std::vector<const DenseTensor*>;
List on_host(Call& call, const List& tensors, phi::TypeTag<const List&>) {
  List list;
  for (const DenseTensor* tensor : tensors) {
    list.push_back(call.input(tensor));
  }
  return list;
}

DenseTensor* on_host(Call& call, DenseTensor* tensor, phi::TypeTag<DenseTensor*>) {
  return call.output(tensor);
}

std::vector<DenseTensor*> on_host(
    Call& call, const std::vector<DenseTensor*>& tensors, phi::TypeTag<std::vector<DenseTensor*>>) {
  std::vector<DenseTensor*> list;
  for (DenseTensor* tensor : tensors) {
    list.push_back(call.output(tensor));
  }
  return list;
}

const phi::SelectedRows& on_host(
    Call& call, const phi::SelectedRows& rows, phi::TypeTag<const phi::SelectedRows&>) {
  return *call.rows(&rows);
}

phi::SelectedRows* on_host(Call& call, phi::SelectedRows* rows, phi::TypeTag<phi::SelectedRows*>) {
  return call.rows_out(rows);
}

// -- kernels ------------------------------------------------------------------------------------------------

const phi::Kernel& float32_kernel(const char* name) {
  phi::KernelKey key(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, DataType::FLOAT32);
  return phi::KernelFactory::Instance().SelectKernel(name, key);
}

// The kernel in low precision of an operation, whose kernel in float32 has the signature `Function`. `Tag` is a type of
// its own for each operation.
template <typename Tag, typename Function>
struct Low;

template <typename Tag, typename... Args>
struct Low<Tag, void (*)(const phi::CPUContext&, Args...)> {
  using Function = void (*)(const phi::CPUContext&, Args...);
  static inline Function compute = nullptr;
  static inline bool has_masters = false;
  static inline void (*correct)(Args...) = nullptr;  // what a GPU returns and the CPU's kernel does not

  static void run(const phi::CustomContext& device, Args... args) {
    Call call(device);
    // In braces arguments are evaluated in their order: outputs after inputs.
    std::tuple<decltype(on_host(call, std::declval<Args>(), phi::TypeTag<Args>()))...> arguments{
        on_host(call, std::forward<Args>(args), phi::TypeTag<Args>())...};
    if (has_masters) {
      call.compute_with_master();
    }
    std::apply([&](auto&&... each) { compute(call.host(), std::forward<decltype(each)>(each)...); }, arguments);
    call.finish();
    if (correct != nullptr) {
      correct(args...);
    }
  }
};

template <auto function>
phi::Kernel kernel_of() {
  using Type = decltype(function);
  return phi::Kernel(&phi::KernelImpl<Type, function>::Compute, reinterpret_cast<void*>(function));
}

void add_kernel(const std::string& name, phi::Kernel kernel, DataType dtype) {
  *kernel.mutable_args_def() = float32_kernel(name.c_str()).args_def();
  auto backend = static_cast<phi::Backend>(phi::TransToPhiBackend(phi::CustomPlace(device_type)));
  auto adapt = [&](auto& definitions) {
    for (phi::TensorArgDef& definition : definitions) {
      definition.SetBackend(definition.backend == phi::Backend::CPU ? backend : definition.backend);
      definition.SetDataType(definition.dtype == DataType::FLOAT32 ? dtype : definition.dtype);
    }
  };
  adapt(kernel.mutable_args_def()->input_defs());
  adapt(kernel.mutable_args_def()->output_defs());
  auto& kernels = phi::KernelFactory::Instance().kernels();
  kernels[name][phi::KernelKey(backend, phi::DataLayout::ALL_LAYOUT, dtype)] = kernel;
}

// Float32, too: where Paddle falls back to the CPU, what is written in place is other memory afterwards.
constexpr std::initializer_list<DataType> DTYPES = {DataType::FLOAT16, DataType::BFLOAT16, DataType::FLOAT32};

template <typename Function, typename Tag>
void add(Tag, const char* name, bool has_masters, decltype(Low<Tag, Function>::correct) correct = nullptr) {
  using Kernel = Low<Tag, Function>;
  Kernel::compute = float32_kernel(name).GetVariadicKernelFn<Function>();
  Kernel::has_masters = has_masters;
  Kernel::correct = correct;
  if (Kernel::compute == nullptr) {
    throw std::runtime_error(std::string("Paddle has no float32 kernel for ") + name);
  }
  for (DataType dtype : DTYPES) {
    add_kernel(name, kernel_of<&Kernel::run>(), dtype);
  }
}

// The result counts: what is finite in float32 may not be so in float16.
void check_finite_and_unscale(
    const phi::CustomContext& device, const std::vector<const DenseTensor*>& gradients, const DenseTensor& scale,
    std::vector<DenseTensor*> results, DenseTensor* overflow) {
  float inverse = 1.0f / *scale.data<float>();
  bool* overflowed = device.Alloc<bool>(overflow);
  *overflowed = false;
  for (size_t index = 0; index < gradients.size(); ++index) {
    DataType dtype = gradients[index]->dtype();
    DenseTensor gradient = *gradients[index];  // one that lies on the host loses its memory when its result is allocated
    device.Alloc(results[index], dtype);
    for (int64_t place = 0; place < gradient.numel(); ++place) {
      round_into(results[index]->data(), place, dtype, widened(gradient.data(), place, dtype) * inverse);
      *overflowed |= !std::isfinite(widened(results[index]->data(), place, dtype));
    }
  }
}

// The softmax of what holds NaN or inf, or nothing but -inf, is NaN on a GPU. The CPU's kernel bounds what it takes, and
// returns finite numbers where a row has eight elements or more.
void spoil(const DenseTensor& inputs, int axis, std::initializer_list<DenseTensor*> results) {
  const phi::DDim& dims = inputs.dims();
  axis = axis < 0 ? axis + dims.size() : axis;
  int64_t size = dims.size() ? dims[axis] : 1, apart = 1;
  for (int later = axis + 1; later < dims.size(); ++later) {
    apart *= dims[later];
  }
  for (int64_t row = 0; row < inputs.numel() / size; ++row) {
    int64_t first = row / apart * size * apart + row % apart;
    float highest = -INFINITY;
    for (int64_t place = 0; place < size && !std::isnan(highest); ++place) {
      float value = widened(inputs.data(), first + place * apart, inputs.dtype());
      highest = value > highest || std::isnan(value) ? value : highest;
    }
    if (std::isfinite(highest)) {
      continue;
    }
    for (DenseTensor* result : results) {
      bool whole = result->numel() == inputs.numel();
      for (int64_t place = 0; place < (whole ? size : 1); ++place) {
        round_into(result->data(), whole ? first + place * apart : row, result->dtype(), NAN);
      }
    }
  }
}

void spoil_softmax(const DenseTensor& inputs, int axis, DenseTensor* result) {
  spoil(inputs, axis, {result});
}

void spoil_cross_entropy(
    const DenseTensor& logits, const DenseTensor&, bool, bool use_softmax, bool, int, int axis, DenseTensor* softmax,
    DenseTensor* loss) {
  if (use_softmax) {
    spoil(logits, axis, {softmax, loss});
  }
}

// -- views ----------------------------------------------------------------------------------------------------

// Elements of a view lie apart; they are copied in order from there, or to there.
template <typename Function>
void each_element(const phi::DDim& dims, const phi::DDim& strides, const Function& function) {
  for (int64_t place = 0, count = phi::product(dims); place < count; ++place) {
    int64_t apart = 0, rest = place;
    for (int axis = dims.size() - 1; axis >= 0; --axis) {
      apart += rest % dims[axis] * strides[axis];
      rest /= dims[axis];
    }
    function(place, apart);
  }
}

void contiguous(const phi::CustomContext& device, const DenseTensor& view, DenseTensor* result) {
  phi::DenseTensorMeta meta = view.meta();
  meta.strides = meta.calc_strides(meta.dims);
  meta.offset = 0;
  result->set_meta(meta);
  size_t bytes = phi::SizeOf(view.dtype());
  auto* to = static_cast<char*>(device.Alloc(result, view.dtype()));
  auto* from = static_cast<const char*>(view.data());
  each_element(view.dims(), view.strides(), [&](int64_t place, int64_t apart) {
    std::memcpy(to + place * bytes, from + apart * bytes, bytes);
  });
}

void strided_copy(
    const phi::CustomContext& device, const DenseTensor& values, const std::vector<int64_t>& dims,
    const std::vector<int64_t>& strides, int64_t offset, DenseTensor* view) {
  phi::DenseTensorMeta meta = view->meta();
  meta.dims = phi::make_ddim(dims);
  meta.strides = phi::make_ddim(strides);
  meta.offset = offset;
  view->set_meta(meta);
  size_t bytes = phi::SizeOf(values.dtype());
  DenseTensor ordered;
  contiguous(device, values, &ordered);
  auto* to = static_cast<char*>(view->data());
  auto* from = static_cast<const char*>(ordered.data());
  each_element(meta.dims, meta.strides, [&](int64_t place, int64_t apart) {
    std::memcpy(to + apart * bytes, from + place * bytes, bytes);
  });
}

void add_views() {
  for (DataType dtype :
       {DataType::BOOL, DataType::UINT8, DataType::INT8, DataType::INT16, DataType::INT32, DataType::INT64,
        DataType::FLOAT16, DataType::BFLOAT16, DataType::FLOAT32, DataType::FLOAT64}) {
    add_kernel("contiguous", kernel_of<&contiguous>(), dtype);
    add_kernel("strided_copy", kernel_of<&strided_copy>(), dtype);
  }
}

#define ADD(op, function, ...) add<decltype(&phi::function##Kernel<float, phi::CPUContext>)>([] {}, #op, __VA_ARGS__);
#define KERNEL(op, function) ADD(op, function, false)
#define WITH_GRADIENT(op, function) KERNEL(op, function) KERNEL(op##_grad, function##Grad)
#define REDUCTION(op, function) KERNEL(op, function) KERNEL(op##_grad, Reduce##function##Grad)
#define OPTIMIZER(op, function) ADD(op, function, true)

void add_kernels() {
  WITH_GRADIENT(abs, Abs)
  WITH_GRADIENT(add, Add)
  WITH_GRADIENT(addmm, Addmm)
  WITH_GRADIENT(batch_norm, BatchNorm)
  WITH_GRADIENT(bmm, Bmm)
  KERNEL(cast, Cast)
  WITH_GRADIENT(clip, Clip)
  WITH_GRADIENT(concat, Concat)
  WITH_GRADIENT(conv2d, Conv)
  WITH_GRADIENT(cos, Cos)
  ADD(cross_entropy_with_softmax, CrossEntropyWithSoftmax, false, &spoil_cross_entropy)
  KERNEL(cross_entropy_with_softmax_grad, CrossEntropyWithSoftmaxGrad)
  WITH_GRADIENT(divide, Divide)
  WITH_GRADIENT(embedding, Embedding)
  WITH_GRADIENT(exp, Exp)
  WITH_GRADIENT(expand, Expand)
  WITH_GRADIENT(gather, Gather)
  WITH_GRADIENT(gelu, Gelu)
  WITH_GRADIENT(group_norm, GroupNorm)
  WITH_GRADIENT(layer_norm, LayerNorm)
  WITH_GRADIENT(linear_v2, LinearV2)
  WITH_GRADIENT(log, Log)
  ADD(log_softmax, LogSoftmax, false, &spoil_softmax)
  KERNEL(log_softmax_grad, LogSoftmaxGrad)
  WITH_GRADIENT(matmul, Matmul)
  REDUCTION(max, Max)
  WITH_GRADIENT(maximum, Maximum)
  REDUCTION(mean, Mean)
  WITH_GRADIENT(mean_all, MeanAll)
  WITH_GRADIENT(minimum, Minimum)
  WITH_GRADIENT(multiply, Multiply)
  WITH_GRADIENT(p_norm, PNorm)
  WITH_GRADIENT(pool2d, Pool2d)
  WITH_GRADIENT(pow, Pow)
  WITH_GRADIENT(reciprocal, Reciprocal)
  WITH_GRADIENT(relu, Relu)
  WITH_GRADIENT(rnn, Rnn)
  WITH_GRADIENT(rsqrt, Rsqrt)
  WITH_GRADIENT(sigmoid, Sigmoid)
  WITH_GRADIENT(silu, Silu)
  ADD(softmax, Softmax, false, &spoil_softmax)
  KERNEL(softmax_grad, SoftmaxGrad)
  WITH_GRADIENT(sin, Sin)
  WITH_GRADIENT(sqrt, Sqrt)
  WITH_GRADIENT(square, Square)
  WITH_GRADIENT(squared_l2_norm, SquaredL2Norm)
  WITH_GRADIENT(subtract, Subtract)
  REDUCTION(sum, Sum)
  WITH_GRADIENT(tanh, Tanh)
  WITH_GRADIENT(where, Where)
  KERNEL(add_n, AddN)
  KERNEL(argmax, ArgMax)
  KERNEL(embedding_sparse_grad, EmbeddingSparseGrad)
  KERNEL(fill, Fill)
  KERNEL(merge_selected_rows, sr::MergeSelectedRows)
  KERNEL(min, Min)
  KERNEL(scale, Scale)
  OPTIMIZER(adam, AdamDense)
  OPTIMIZER(adam_dense_param_sparse_grad, sr::AdamDenseParamSparseGrad)
  OPTIMIZER(adamw, AdamwDense)
  OPTIMIZER(adamw_dense_param_sparse_grad, sr::AdamwDenseParamSparseGrad)
  OPTIMIZER(momentum, MomentumDense)
  OPTIMIZER(momentum_dense_param_sparse_grad, MomentumSparse)
  OPTIMIZER(rmsprop, RmspropDense)
  OPTIMIZER(sgd, SGDDense)
  OPTIMIZER(sgd_dense_param_sparse_grad, SGDDenseParamSparseGrad)
  for (DataType dtype : DTYPES) {
    add_kernel("check_finite_and_unscale", kernel_of<&check_finite_and_unscale>(), dtype);
  }
}

// -- the device -----------------------------------------------------------------------------------------------

C_Status done() {
  return C_SUCCESS;
}
C_Status with_device(const C_Device) {
  return C_SUCCESS;
}
C_Status with_stream(const C_Device, C_Stream) {
  return C_SUCCESS;
}
C_Status with_event(const C_Device, C_Event) {
  return C_SUCCESS;
}
C_Status with_both(const C_Device, C_Stream, C_Event) {
  return C_SUCCESS;
}

C_Status copy(const C_Device, void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return C_SUCCESS;
}

C_Status allocate(const C_Device, void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return *memory ? C_SUCCESS : C_FAILED;
}

C_Status release(const C_Device, void* memory, size_t) {
  std::free(memory);
  return C_SUCCESS;
}

DataType kind_of(C_DataType dtype) {
  return dtype == C_DataType::FLOAT32    ? DataType::FLOAT32
         : dtype == C_DataType::FLOAT16  ? DataType::FLOAT16
         : dtype == C_DataType::BFLOAT16 ? DataType::BFLOAT16
                                         : DataType::UNDEFINED;
}

// y = alpha x + beta y: Paddle adds gradients up by it.
C_Status combine(
    const C_Device, C_Stream, C_DataType dtype, size_t elements, float alpha, void* x, float beta, void* y) {
  DataType kind = kind_of(dtype);
  if (kind == DataType::UNDEFINED) {
    return C_FAILED;
  }
  for (size_t place = 0; place < elements; ++place) {
    round_into(y, place, kind, alpha * widened(x, place, kind) + beta * widened(y, place, kind));
  }
  return C_SUCCESS;
}

// -- processes ------------------------------------------------------------------------------------------------

// Those of one machine meet in memory that they share, under a name that the first hands on. Sums are those of float32,
// rounded once, as a GPU's library adds two.
constexpr size_t CHUNK = 1 << 16;
constexpr size_t MOST = 4;

struct Shared {
  std::atomic<size_t> arrived, turn;
  char chunks[MOST][CHUNK];
};

struct Meeting {
  Shared* shared;
  size_t ranks, rank;

  void wait() {
    size_t turn = shared->turn;
    if (++shared->arrived == ranks) {
      shared->arrived = 0;
      ++shared->turn;
    }
    while (shared->turn == turn) {
      std::this_thread::yield();
    }
  }

  // Each rank offers its part of some bytes, and takes what it wants of all parts, chunk by chunk.
  template <typename Function>
  void exchange(const void* offered, size_t bytes, const Function& take) {
    for (size_t start = 0; start < bytes; start += CHUNK) {
      size_t length = std::min(CHUNK, bytes - start);
      std::memcpy(shared->chunks[rank], static_cast<const char*>(offered) + start, length);
      wait();
      take(start, length);
      wait();
    }
  }
};

constexpr size_t NAME = 32;

C_Status name_meeting(C_CCLRootId* id) {
  static int meetings = 0;
  std::snprintf(static_cast<char*>(id->data), NAME, "/ampx-%d-%d", getpid(), meetings++);
  return C_SUCCESS;
}

C_Status meet(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
  const char* name = static_cast<const char*>(id->data);
  int file = shm_open(name, O_CREAT | O_RDWR, 0600);
  if (ranks > MOST || file < 0 || ftruncate(file, sizeof(Shared)) != 0) {
    return C_FAILED;
  }
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  auto* meeting = new Meeting{static_cast<Shared*>(memory), ranks, rank};
  meeting->wait();
  shm_unlink(name);  // all are there
  *comm = reinterpret_cast<C_CCLComm>(meeting);
  return C_SUCCESS;
}

C_Status part(C_CCLComm comm) {
  auto* meeting = reinterpret_cast<Meeting*>(comm);
  munmap(meeting->shared, sizeof(Shared));
  delete meeting;
  return C_SUCCESS;
}

C_Status all_reduce(
    void* from, void* to, size_t count, C_DataType dtype, C_CCLReduceOp op, C_CCLComm comm, C_Stream) {
  auto* meeting = reinterpret_cast<Meeting*>(comm);
  if (dtype == C_DataType::INT32 && op == SUM) {  // a barrier of Paddle's
    meeting->exchange(from, count * sizeof(int), [&](size_t start, size_t length) {
      for (size_t place = 0; place < length / sizeof(int); ++place) {
        int sum = 0;
        for (size_t rank = 0; rank < meeting->ranks; ++rank) {
          sum += reinterpret_cast<int*>(meeting->shared->chunks[rank])[place];
        }
        static_cast<int*>(to)[start / sizeof(int) + place] = sum;
      }
    });
    return C_SUCCESS;
  }
  DataType kind = kind_of(dtype);
  if (kind == DataType::UNDEFINED || (op != SUM && op != AVG)) {
    return C_FAILED;
  }
  size_t bytes = phi::SizeOf(kind);
  meeting->exchange(from, count * bytes, [&](size_t start, size_t length) {
    for (size_t place = 0; place < length / bytes; ++place) {
      float sum = 0;
      for (size_t rank = 0; rank < meeting->ranks; ++rank) {
        sum += widened(meeting->shared->chunks[rank], place, kind);
      }
      round_into(to, start / bytes + place, kind, op == AVG ? sum / meeting->ranks : sum);
    }
  });
  return C_SUCCESS;
}

C_Status broadcast(void* values, size_t count, C_DataType dtype, size_t root, C_CCLComm comm, C_Stream) {
  auto* meeting = reinterpret_cast<Meeting*>(comm);
  DataType kind = kind_of(dtype);
  size_t bytes = dtype == C_DataType::INT64    ? 8
                 : dtype == C_DataType::INT32  ? 4
                 : kind == DataType::UNDEFINED ? 0
                                               : phi::SizeOf(kind);
  if (bytes == 0) {
    return C_FAILED;
  }
  meeting->exchange(values, count * bytes, [&](size_t start, size_t length) {
    std::memcpy(static_cast<char*>(values) + start, meeting->shared->chunks[root], length);
  });
  return C_SUCCESS;
}

}  // namespace

extern "C" void InitPlugin(CustomRuntimeParams* params) {
  params->device_type = device_type;
  params->sub_device_type = device_model;
  params->version.major = PADDLE_CUSTOM_RUNTIME_MAJOR_VERSION;
  params->version.minor = PADDLE_CUSTOM_RUNTIME_MINOR_VERSION;
  params->version.patch = PADDLE_CUSTOM_RUNTIME_PATCH_VERSION;
  C_DeviceInterface& interface = *params->interface;
  std::memset(&interface, 0, sizeof(interface));
  interface.size = sizeof(interface);
  interface.initialize = interface.finalize = done;
  interface.init_device = interface.deinit_device = interface.set_device = with_device;
  interface.get_device = [](const C_Device device) { return device->id = 0, C_SUCCESS; };
  interface.get_device_count = [](size_t* count) { return *count = 1, C_SUCCESS; };
  interface.get_device_list = [](size_t* devices) { return *devices = 0, C_SUCCESS; };
  // All work is done at once, in its order.
  interface.create_stream = [](const C_Device, C_Stream* stream) { return *stream = nullptr, C_SUCCESS; };
  interface.create_event = [](const C_Device, C_Event* event) { return *event = nullptr, C_SUCCESS; };
  interface.destroy_stream = interface.synchronize_stream = interface.query_stream = with_stream;
  interface.destroy_event = interface.synchronize_event = interface.query_event = with_event;
  interface.record_event = interface.stream_wait_event = with_both;
  interface.synchronize_device = with_device;
  interface.memory_copy_h2d = interface.memory_copy_d2d = interface.memory_copy_d2h = copy;
  interface.async_memory_copy_h2d = interface.async_memory_copy_d2d = interface.async_memory_copy_d2h =
      [](const C_Device device, C_Stream, void* to, const void* from, size_t bytes) {
        return copy(device, to, from, bytes);
      };
  interface.device_memory_allocate = interface.host_memory_allocate = interface.unified_memory_allocate = allocate;
  interface.device_memory_deallocate = interface.host_memory_deallocate = interface.unified_memory_deallocate = release;
  interface.device_memory_set = [](const C_Device, void* memory, unsigned char value, size_t bytes) {
    std::memset(memory, value, bytes);
    return C_SUCCESS;
  };
  interface.device_memory_stats = [](const C_Device, size_t* total, size_t* free) {
    return *total = *free = size_t(1) << 33, C_SUCCESS;
  };
  interface.device_min_chunk_size = [](const C_Device, size_t* bytes) { return *bytes = 1 << 12, C_SUCCESS; };
  interface.device_max_chunk_size = [](const C_Device, size_t* bytes) { return *bytes = 1 << 20, C_SUCCESS; };
  interface.is_float16_supported = interface.is_bfloat16_supported = [](const C_Device, bool* supported) {
    return *supported = true, C_SUCCESS;
  };
  interface.blas_axpby = combine;
  interface.xccl_get_unique_id_size = [](size_t* size) { return *size = NAME, C_SUCCESS; };
  interface.xccl_get_unique_id = name_meeting;
  interface.xccl_get_comm_name = [](C_CCLComm, char* name) { return std::strcpy(name, "shared"), C_SUCCESS; };
  interface.xccl_comm_init_rank = meet;
  interface.xccl_destroy_comm = part;
  interface.xccl_all_reduce = all_reduce;
  interface.xccl_broadcast = broadcast;
  interface.xccl_group_start = interface.xccl_group_end = done;
  add_kernels();
  add_views();
}
