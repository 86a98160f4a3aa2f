// A device "cuda" for a CPU build of PyTorch: tensors of the device lie in the host's memory, and CPU kernels compute.
//
// The dispatcher works on such tensors as on a GPU's: autocast, autograd and composite operations see the keys of CUDA.
// What arrives at the key of the kernels themselves is computed by `compute_on_host`.
#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/set_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <atomic>
#include <string>
#include <unordered_set>
#include <vector>

namespace at {

// torch looks hooks up by the name of the class: no other will do.
struct CUDAHooks : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  Allocator* getPinnedMemoryAllocator() const override { return GetAllocator(kCPU); }
  bool isPinnedPtr(const void*) const override { return false; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

namespace {

const Device DEVICE(kCUDA, 0);

// One stream on which everything is done at once: an event has happened when it is recorded.
struct Guard : public c10::impl::NoOpDeviceGuardImpl<kCUDA> {
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(DEVICE); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// -- reads by the host ------------------------------------------------------------------------------------

std::atomic<int> sync_mode{0};  // as torch.cuda counts them: 0 default, 1 warn, 2 error
std::atomic<int64_t> syncs{0};

// What needs a value or a shape that only the device has.
const std::unordered_set<std::string> READS = {
    "aten::_local_scalar_dense", "aten::bincount",       "aten::equal",
    "aten::masked_select",       "aten::nonzero",        "aten::repeat_interleave",
    "aten::_unique2",            "aten::unique_dim",     "aten::unique_consecutive",
};
// The only ones that take a tensor of the host which is no scalar beside one of the device.
const std::unordered_set<std::string> ACROSS_DEVICES = {
    "aten::copy_", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
};

void count_sync(const std::string& name) {
  ++syncs;
  const char* message = "called a synchronizing CUDA operation";
  TORCH_CHECK(sync_mode != 2, message, ": ", name);
  if (sync_mode == 1) {
    TORCH_WARN(message, ": ", name);
  }
}

// -- memory that has two names ---------------------------------------------------------------------------

void release(void* storage) {
  delete static_cast<Storage*>(storage);
}

// The same bytes under the name of another device; they live as long as either.
Storage rename(const Storage& storage, Device device) {
  DataPtr data(storage.mutable_data(), new Storage(storage), &release, device);
  return Storage(
      Storage::use_byte_size_t(), storage.nbytes(), std::move(data), GetAllocator(kCPU), /*resizable=*/true);
}

// A tensor over such bytes, laid out as `like`.
Tensor over(const Storage& storage, const Tensor& like) {
  DispatchKey key = storage.device().is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU;
  Tensor tensor = detail::make_tensor<TensorImpl>(Storage(storage), DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

// One call of an operation: each tensor of the device in it has one of the host that stands for it.
class Call {
 public:
  explicit Call(const OperatorName& name) : name_(name.name) {}

  void to_host(IValue& value) {
    if (value.isDevice() && value.toDevice().is_cuda()) {
      value = Device(kCPU);
      makes_tensors_ = true;
    } else {
      replace(value, [this](const Tensor& tensor) { return stand_in(tensor); });
    }
  }

  void to_device(IValue& value) const {
    if (makes_tensors_ || !pairs_.empty()) {
      replace(value, [this](const Tensor& tensor) { return original(tensor); });
    }
  }

  // A GPU's kernels take no tensor of the host, or only scalars.
  void check_devices() const {
    bool takes_scalars = name_.rfind("aten::_amp_", 0) != 0 && name_.rfind("aten::_fused_", 0) != 0;
    TORCH_CHECK(
        pairs_.empty() || ACROSS_DEVICES.count(name_) || !(of_host_ || (scalars_of_host_ && !takes_scalars)),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name_, ")");
  }

  // What was changed in place, or is an `out=`, may have another shape now, and other memory.
  void follow() const {
    for (const auto& [device, host] : pairs_) {
      if (host.storage().data() != device.storage().data()) {
        Storage renamed = rename(host.storage(), DEVICE);
        StorageImpl* storage = device.storage().unsafeGetStorageImpl();
        storage->set_data_ptr_noswap(std::move(renamed.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
        storage->set_nbytes(host.storage().nbytes());
      }
      if (device.sizes() != host.sizes() || device.strides() != host.strides()) {
        device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      }
    }
  }

 private:
  template <typename Function>
  static void replace(IValue& value, const Function& function) {
    if (value.isTensor()) {
      value = function(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(function(tensor));
      }
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::make_optional(function(*tensor)) : std::nullopt);
      }
      value = list;
    } else if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
      c10::List<c10::List<Tensor>> lists;  // what several processes are to fill
      for (IValue list : value.toListRef().vec()) {
        replace(list, function);
        lists.push_back(list.toTensorList());
      }
      value = lists;
    }
  }

  Tensor stand_in(const Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!tensor.is_cuda()) {
      ++(tensor.dim() ? of_host_ : scalars_of_host_);
      return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == kStrided, "the simulated CUDA device has dense tensors only: ", name_);
    for (const auto& [device, host] : pairs_) {
      if (device.is_same(tensor)) {
        return host;
      }
    }
    pairs_.emplace_back(tensor, over(rename(tensor.storage(), Device(kCPU)), tensor));
    return pairs_.back().second;
  }

  Tensor original(const Tensor& result) const {
    if (!result.defined() || result.is_cuda()) {
      return result;
    }
    for (const auto& [device, host] : pairs_) {
      if (host.is_same(result)) {
        return device;
      }
      if (host.storage().is_alias_of(result.storage())) {
        return over(device.storage(), result);
      }
    }
    return over(rename(result.storage(), DEVICE), result);
  }

  std::string name_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // of the device, of the host
  int of_host_ = 0, scalars_of_host_ = 0;
  bool makes_tensors_ = false;
};

bool waits_for_the_device(const std::string& name, const IValue* arguments) {
  if (name == "aten::copy_") {
    bool blocking = !arguments[2].toBool();
    return blocking && arguments[0].toTensor().device() != arguments[1].toTensor().device();
  }
  if (ACROSS_DEVICES.count(name)) {  // indices: how many elements a mask selects only the device knows
    for (const std::optional<Tensor>& index : arguments[1].toOptionalTensorVector()) {
      if (index && index->is_cuda() && index->scalar_type() == kBool) {
        return true;
      }
    }
  }
  return READS.count(name);
}

// What was seen to be refused with torch 2.11 on an H200, where the CPU's kernels compute.
void refuse_as_cuda(const c10::OperatorHandle& op, const IValue* arguments) {
  const std::string& name = op.operator_name().name;
  if (name == "aten::_amp_foreach_non_finite_check_and_unscale_") {  // pytorch/pytorch#127176
    for (const Tensor& gradient : arguments[0].toTensorVector()) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          gradient.scalar_type() != kBFloat16,
          "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'");
    }
  }
  if (name == "aten::empty" && op.operator_name().overload_name == "memory_format" && !arguments[4].isNone()) {
    TORCH_CHECK(!arguments[4].toBool(), "Only dense CPU tensors can be pinned");
  }
}

// Softmax of float16 with results in float32 is one kernel on GPUs and none on CPUs, nor is its derivative.
void widen_softmax(const std::string& name, IValue* arguments) {
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && arguments[2].toBool()) {
    arguments[0] = arguments[0].toTensor().to(kFloat);
    arguments[2] = false;
  }
}

void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.operator_name().name;
  const size_t first = stack->size() - op.schema().arguments().size();
  // Autocast of the CPU, if that is on too, has no say in what the device computes.
  c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
  AutoDispatchBelowADInplaceOrView without_autograd;

  refuse_as_cuda(op, stack->data() + first);
  Call call(op.operator_name());
  bool waits = waits_for_the_device(name, stack->data() + first);
  for (size_t position = first; position < stack->size(); ++position) {
    call.to_host((*stack)[position]);
  }
  call.check_devices();
  if (waits) {
    count_sync(name);
  }
  widen_softmax(name, stack->data() + first);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.follow();
  for (size_t position = first; position < stack->size(); ++position) {
    call.to_device((*stack)[position]);
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

// These have kernels that are meant for every device and ask it for more than a fallback.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const char* name : {"copy_", "convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
  }
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(native::set_storage_cpu_));
  library.impl("set_.source_Storage", TORCH_FN(static_cast<Tensor& (*)(Tensor&, Storage)>(native::set_)));
  library.impl("set_.source_Tensor", TORCH_FN(native::set_tensor_));
}

// Processes talk over the memory of the host: what is asked of the device the backend of the CPU does. torch has kernels
// of its own there, and warns that they are replaced.
struct Silence : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

const torch::Library COLLECTIVES = [] {
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard silent(&silence);
  torch::Library library(torch::Library::IMPL, "c10d", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const char* name :
       {"allgather_", "_allgather_base_", "allreduce_", "allreduce_coalesced_", "barrier", "broadcast_",
        "reduce_scatter_", "_reduce_scatter_base_"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
  }
  return library;
}();

// DistributedDataParallel asks for the timer of its device, and does without times.
struct Timer : public c10d::Timer {
  explicit Timer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace
}  // namespace at

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, at::Timer);
}

extern "C" void simulated_cuda_set_sync_mode(int mode) {
  at::sync_mode = mode;
}

extern "C" int64_t simulated_cuda_syncs() {
  return at::syncs;
}

extern "C" int simulated_cuda_sync_mode() {
  return at::sync_mode;
}
