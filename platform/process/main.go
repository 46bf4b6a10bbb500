package process

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"watershed.dev/platform/config"
	"watershed.dev/platform/version"
)

// Command declares the flags of a command in fs. It returns the function that runs the command once fs has the values.
type Command func(fs *pflag.FlagSet) (run func() error)

// ErrorLine returns the text of an error as a line. Joined errors have several lines.
func ErrorLine(text string) string { return strings.Join(strings.FieldsFunc(text, isNewline), "; ") }

func isNewline(r rune) bool { return r == '\n' || r == '\r' }

// CommandMain is the main function of a binary with one command. It runs the command with the arguments of the command
// line, or prints the version.
func CommandMain(name string, command Command) {
	if len(os.Args) == 2 && (os.Args[1] == "version" || os.Args[1] == "--version") {
		fmt.Println(version.Line(name))
		return
	}
	LimitMemory()
	fs := pflag.NewFlagSet(name, pflag.ContinueOnError)
	fs.Usage = func() { fmt.Printf("Usage of %s:\n%s", name, fs.FlagUsages()) }
	run := command(fs)
	err := config.Load(fs, os.Args[1:])
	if err == nil {
		err = run()
	}
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, name+":", ErrorLine(err.Error()))
		os.Exit(1)
	}
}
