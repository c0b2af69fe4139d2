// A PyTorch device whose memory is the host's and whose kernels are those for CPUs: each operation is computed on CPU
// tensors that share the device tensors' memory, so that results are equal to those of a CPU run, bit for bit.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <set>
#include <string>

namespace {

constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;
thread_local c10::DeviceIndex current = 0;
std::atomic<int64_t> allocated{0}, peak{0};

// So little that the largest matrix products by which a run measures the device do not fit.
constexpr int64_t TOTAL = 160 << 20;

void count(int64_t change) {
  const int64_t now = allocated += change;
  if (change > 0 && now > TOTAL) {
    allocated -= change;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", change, " bytes");
  }
  for (int64_t seen = peak; now > seen && !peak.compare_exchange_weak(seen, now);) {
  }
}

c10::Device here() { return c10::Device(NPU, current); }

// The host's storage that owns the bytes of a device storage, or the reverse.
struct Owner {
  c10::Storage storage;
  int64_t counted;
};

void drop(void* context) {
  auto* owner = static_cast<Owner*>(context);
  if (owner->counted) {
    count(-owner->counted);
  }
  delete owner;
}

c10::Storage same_bytes(const c10::Storage& storage, c10::Device device) {
  const int64_t counted = device.type() == NPU ? static_cast<int64_t>(storage.nbytes()) : 0;
  if (counted) {
    count(counted);
  }
  void* bytes = const_cast<void*>(storage.data());
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(bytes, new Owner{storage, counted}, &drop, device), c10::GetAllocator(device.type()), true));
}

at::Tensor with_storage(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

at::Tensor host(const at::Tensor& tensor) {
  return with_storage(tensor, same_bytes(tensor.storage(), c10::Device(c10::kCPU)), c10::DispatchKey::CPU);
}

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    auto bytes = c10::GetCPUAllocator()->allocate(nbytes);
    void* place = bytes.get();
    auto storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), nbytes, std::move(bytes), nullptr, false));
    count(static_cast<int64_t>(nbytes));
    return {place, new Owner{storage, static_cast<int64_t>(nbytes)}, &drop, here()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t nbytes) const override { std::memcpy(target, source, nbytes); }
};
HostMemory memory;
REGISTER_ALLOCATOR(NPU, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return NPU; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = here();
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto made = memory.allocate(nbytes);
    std::memcpy(made.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(made));
    storage.set_nbytes(nbytes);
  }
};
Hooks hooks;

struct Pair {
  at::Tensor device, host;
  const void* bytes;
};

// Operations that real devices let take a CPU tensor with dimensions beside those of the device.
const std::set<std::string> MIXING{"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"};

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<Pair> pairs;
  bool is_on_device = false, has_host_tensor = false;
  const auto lower = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != NPU) {
      has_host_tensor |= tensor.defined() && tensor.dim() > 0;
      return tensor;
    }
    is_on_device = true;
    auto made = host(tensor);
    pairs.push_back({tensor, made, made.storage().data()});
    return made;
  };
  const auto begin = stack->size() - op.schema().arguments().size();
  for (auto index = begin; index < stack->size(); ++index) {
    auto& value = (*stack)[index];
    if (value.isTensor()) {
      value = lower(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) {
        list.push_back(lower(tensor));
      }
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor.has_value() ? std::optional<at::Tensor>(lower(*tensor)) : std::nullopt);
      }
      value = std::move(list);
    } else if (value.isDevice() && value.toDevice().type() == NPU) {
      value = c10::Device(c10::kCPU);
      is_on_device = true;
    }
  }
  const auto name = toString(op.operator_name());
  TORCH_CHECK(
      pairs.empty() || !has_host_tensor || MIXING.count(name),
      "Expected all tensors to be on the same device, but found npu and cpu: ", name);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& pair : pairs) {  // an `out` or a tensor that was resized
    if (pair.host.storage().data() != pair.bytes) {
      pair.device.unsafeGetTensorImpl()->set_storage_keep_dtype(same_bytes(pair.host.storage(), pair.device.device()));
    }
    if (pair.host.sizes() != pair.device.sizes() || pair.host.strides() != pair.device.strides()) {
      pair.device.unsafeGetTensorImpl()->set_sizes_and_strides(pair.host.sizes(), pair.host.strides());
    }
  }
  const auto raise = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !is_on_device) {
      return tensor;
    }
    for (auto& pair : pairs) {
      if (tensor.unsafeGetTensorImpl() == pair.host.unsafeGetTensorImpl()) {
        return pair.device;
      }
    }
    for (auto& pair : pairs) {
      if (tensor.storage().unsafeGetStorageImpl() == pair.host.storage().unsafeGetStorageImpl()) {
        return with_storage(tensor, pair.device.storage(), c10::DispatchKey::PrivateUse1);
      }
    }
    const auto device = pairs.empty() ? here() : pairs.front().device.device();
    return with_storage(tensor, same_bytes(tensor.storage(), device), c10::DispatchKey::PrivateUse1);
  };
  for (auto index = stack->size() - op.schema().returns().size(); index < stack->size(); ++index) {
    auto& value = (*stack)[index];
    if (value.isTensor()) {
      value = raise(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) {
        list.push_back(raise(tensor));
      }
      value = std::move(list);
    }
  }
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(here()).has_index() ? *device : here());
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(here()).has_index() ? *device : here());
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

at::Tensor on_cpu(const at::Tensor& tensor) { return tensor.device().type() == NPU ? host(tensor) : tensor; }

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_cpu(target).copy_(on_cpu(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(
      tensor, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return at::cpu::set_(tensor, storage, 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return at::cpu::set_(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// As torch_npu: a module that moves to the device keeps its parameters, whose data alone is another's.
bool can_take_the_place(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.layout() == other.layout();
}

int64_t total_bytes() { return TOTAL; }

int64_t allocated_bytes() { return allocated; }

int64_t peak_bytes(bool restarts) {
  if (restarts) {
    peak = allocated.load();
  }
  return peak;
}

int64_t set_device(int64_t device) {
  const auto before = current;
  current = static_cast<c10::DeviceIndex>(device < 0 ? before : device);
  return before;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &can_take_the_place);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
}

TORCH_LIBRARY(stand_in_npu, m) {
  m.def("host(Tensor tensor) -> Tensor", &host);
  m.def("total() -> int", &total_bytes);
  m.def("allocated() -> int", &allocated_bytes);
  m.def("peak(bool restarts) -> int", &peak_bytes);
  m.def("set_device(int device) -> int", &set_device);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
