package process

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"watershed.dev/platform/config"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/version"
)

// Main is the main function of a service's binary. It runs the service with the options of the command line until
// SIGINT or SIGTERM, or prints the version.
func Main(m *Module) { CommandMain(m.Name, Modules{m}.Command([]string{m.Name})) }

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
		fmt.Fprintln(os.Stderr, name+":", ErrorLine(err))
		os.Exit(1)
	}
}

// Command declares the flags of a command in fs. It returns the function that runs the command once fs has the values.
type Command func(fs *pflag.FlagSet) (run func() error)

// Command returns the command that runs the targets until SIGINT or SIGTERM. adjust may change the flags before the
// services receive them.
func (all Modules) Command(targets []string, adjust ...func(*pflag.FlagSet)) Command {
	return func(fs *pflag.FlagSet) func() error {
		p, err := declare(all, targets, fs)
		return func() error {
			if err != nil {
				return err
			}
			return p.run(fs, targets, adjust)
		}
	}
}

// run runs the process with the values of fs.
func (p *Process) run(fs *pflag.FlagSet, targets []string, adjust []func(*pflag.FlagSet)) error {
	for _, f := range adjust {
		f(fs)
	}
	if err := p.configure(fs, targets); err != nil {
		return err
	}
	ctx, cancel := lifecycle.SignalContext()
	defer cancel()
	flush, err := p.Telemetry.Start(ctx, p.name(), os.Stderr)
	if err != nil {
		return err
	}
	defer flush()
	defer p.network.close()
	p.setGCPercent()
	runners, err := p.Runners(ctx)
	if err != nil {
		return err
	}
	slog.Info("Starting", "version", version.Release(), "services", p.modules.Names())
	return lifecycle.Run(ctx, runners, lifecycle.Observer{})
}

// Load returns a process with the targets, which is configured by the options in args as its command does.
func Load(all Modules, targets []string, command string, args []string) (*Process, error) {
	fs := pflag.NewFlagSet(command, pflag.ContinueOnError)
	p, err := declare(all, targets, fs)
	if err != nil {
		return nil, err
	}
	if err := config.Load(fs, args); err != nil {
		return nil, all.FlagError(err)
	}
	return p, p.configure(fs, targets)
}

// declare returns a process with the targets, and adds its flags to fs.
func declare(all Modules, targets []string, fs *pflag.FlagSet) (*Process, error) {
	p, err := New(all, targets)
	if err == nil {
		fs.StringSlice("target", targets, "The services of this process, of "+strings.Join(all.Names(), ", ")+".")
		p.AddNetworkFlags(fs)
		p.AddFlags(fs)
	}
	return p, err
}

func (p *Process) configure(fs *pflag.FlagSet, targets []string) error {
	if given, _ := fs.GetStringSlice("target"); !slices.Equal(given, targets) {
		return fmt.Errorf("--target=%s: this command runs %s: want `watershed run`", strings.Join(given, ","),
			strings.Join(targets, ","))
	}
	return p.Configure(fs)
}

// FlagError adds to an error about an unknown flag the service that has the flag.
func (all Modules) FlagError(err error) error {
	var unknown *config.UnknownFlagError
	if !errors.As(err, &unknown) {
		return err
	}
	for _, m := range all {
		fs := pflag.NewFlagSet(m.Name, pflag.ContinueOnError)
		if m.Options().AddFlags(fs); fs.Lookup(unknown.Name) != nil {
			return fmt.Errorf("%w: it is a flag of %s, which is not among the targets", err, m.Name)
		}
	}
	return err
}

// ErrorLine returns the text of an error as a line. Joined errors have several lines. The line ends with the remedy of
// an address in use.
func ErrorLine(err error) string {
	line := strings.Join(strings.FieldsFunc(err.Error(), isNewline), "; ")
	if errors.Is(err, syscall.EADDRINUSE) {
		line += ": stop the process that has the address, or choose another address"
	}
	return line
}

func isNewline(r rune) bool { return r == '\n' || r == '\r' }
