package process

import (
	"fmt"
	"os"

	"watershed.dev/platform/version"
)

// CommandMain is the main function of a binary with one command. It runs the command with the arguments of the command
// line, or prints the version.
func CommandMain(name string, command func(name string, args []string) error) {
	if len(os.Args) == 2 && (os.Args[1] == "version" || os.Args[1] == "--version") {
		fmt.Println(version.Line(name))
		return
	}
	LimitMemory()
	if err := command(name, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(1)
	}
}
