package tamper

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Programs read clocks without a system call, by a function of the kernel that is in the memory of each process
// (vdso(7)). SetClock lets the process's private copy of that function jump to replacement, which it writes over
// gettimeofday: Go programs do not call gettimeofday.

// replacement is a clock_gettime for amd64. It makes the system call, and adds seconds to CLOCK_REALTIME only.
var replacement = []byte{
	0xb8, 0xe4, 0x00, 0x00, 0x00, // mov eax, 228 (clock_gettime)
	0x0f, 0x05, // syscall
	0x85, 0xff, // test edi, edi (CLOCK_REALTIME is 0)
	0x75, 0x0a, // jne to ret
	0x48, 0x8b, 0x0d, 0x06, 0x00, 0x00, 0x00, // mov rcx, [rip+6]
	0x48, 0x01, 0x0e, // add [rsi], rcx
	0xc3,       // ret
	0x90, 0x90, // nop
}

const (
	// wordBytes is the size of the number of seconds, which follows replacement.
	wordBytes = 8
	// jump is the first byte of an instruction, which a distance of four bytes follows.
	jump      = 0xe9
	jumpBytes = 5
)

// SetClock sets how far the wall clock of a running Go program is ahead of the machine's, in whole seconds. Monotonic
// time and timers continue as they are. It returns errors.ErrUnsupported if the processor is not amd64, or if the
// kernel does not allow it.
func SetClock(pid int, ahead time.Duration) error {
	if runtime.GOARCH != "amd64" {
		return fmt.Errorf("a wall clock on %s: %w", runtime.GOARCH, errors.ErrUnsupported)
	}
	start, size, err := findVDSO(pid)
	if err != nil {
		return err
	}
	memory, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	if err != nil {
		return unsupported(err)
	}
	defer memory.Close()
	image := make([]byte, size)
	if _, err = memory.ReadAt(image, start); err != nil {
		return unsupported(err)
	}
	from, to, err := findFunctions(image)
	if err != nil {
		return err
	}
	code := binary.LittleEndian.AppendUint64(bytes.Clone(replacement), uint64(ahead/time.Second))
	if image[from] == jump && bytes.HasPrefix(image[to:], replacement) { // it was replaced before
		_, err = memory.WriteAt(code[len(replacement):], start+to+int64(len(replacement)))
		return err
	}
	if _, err = memory.WriteAt(code, start+to); err != nil {
		return unsupported(err)
	}
	// A whole aligned word, so that no thread sees a part of the instruction.
	word := bytes.Clone(image[from : from+wordBytes])
	word[0] = jump
	binary.LittleEndian.PutUint32(word[1:], uint32(to-from-jumpBytes))
	_, err = memory.WriteAt(word, start+from)
	return err
}

// unsupported adds errors.ErrUnsupported to an error of a kernel that does not allow the change.
func unsupported(err error) error {
	if errors.Is(err, os.ErrPermission) || errors.Is(err, unix.EIO) {
		return fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
	}
	return err
}

// findVDSO returns the address and the size of the kernel's functions in a process's memory.
func findVDSO(pid int) (start, size int64, err error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(maps)) {
		if !strings.HasSuffix(strings.TrimSpace(line), "[vdso]") {
			continue
		}
		from, to, _ := strings.Cut(strings.Fields(line)[0], "-")
		start, err = strconv.ParseInt(from, 16, 64)
		end, errEnd := strconv.ParseInt(to, 16, 64)
		return start, end - start, errors.Join(err, errEnd)
	}
	return 0, 0, errors.New("the process has no vDSO")
}

// findFunctions returns the offsets of clock_gettime and gettimeofday in the image of the vDSO.
func findFunctions(image []byte) (clockGettime, gettimeofday int64, err error) {
	file, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return 0, 0, err
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return 0, 0, err
	}
	for _, s := range symbols {
		switch {
		case s.Name == "__vdso_clock_gettime" && s.Value%wordBytes == 0 && s.Size >= wordBytes:
			clockGettime = int64(s.Value)
		case s.Name == "__vdso_gettimeofday" && s.Value%wordBytes == 0 && s.Size >= uint64(len(replacement)+wordBytes):
			gettimeofday = int64(s.Value)
		}
	}
	if clockGettime == 0 || gettimeofday == 0 {
		return 0, 0, fmt.Errorf("%w: the functions of the vDSO cannot be replaced", errors.ErrUnsupported)
	}
	return clockGettime, gettimeofday, nil
}
