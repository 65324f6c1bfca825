// Loaded before an engine whose `cpuid` instructions were replaced (bench/narrow.py): answers them in their place, with
// what the processor says, less what came after AVX2.
#include <cpuid.h>
#include <csignal>
#include <cstdint>
#include <ucontext.h>

namespace {

constexpr unsigned bits() { return 0; }
template <class... More> constexpr unsigned bits(int first, More... more) { return 1u << first | bits(more...); }

// AVX-512 in all its parts, VNNI, bfloat16, AMX, AVX10.
constexpr unsigned EBX_7_0 = bits(16, 17, 21, 26, 27, 28, 30, 31), ECX_7_0 = bits(1, 6, 11, 12, 14);
constexpr unsigned EDX_7_0 = bits(2, 3, 8, 22, 23, 24, 25);
constexpr unsigned EAX_7_1 = bits(4, 5, 21, 23), EDX_7_1 = bits(4, 5, 8, 10, 19);

void answer(int, siginfo_t*, void* context) {
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const auto* at = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
    if (at[0] != 0x0E || at[1] != 0x0E) {  // not ours: it comes again, and ends the process
        signal(SIGILL, SIG_DFL);
        return;
    }
    const auto leaf = static_cast<unsigned>(registers[REG_RAX]), part = static_cast<unsigned>(registers[REG_RCX]);
    unsigned eax, ebx, ecx, edx;
    __cpuid_count(leaf, part, eax, ebx, ecx, edx);
    if (leaf == 7 && part == 0) ebx &= ~EBX_7_0, ecx &= ~ECX_7_0, edx &= ~EDX_7_0;
    if (leaf == 7 && part == 1) eax &= ~EAX_7_1, edx &= ~EDX_7_1;
    registers[REG_RAX] = eax, registers[REG_RBX] = ebx, registers[REG_RCX] = ecx, registers[REG_RDX] = edx;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) void listen() {
    struct sigaction action = {};
    action.sa_sigaction = answer;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
}

}  // namespace
