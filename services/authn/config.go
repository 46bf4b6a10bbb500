package authn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"
	apiserverconfig "k8s.io/apiserver/pkg/apis/apiserver"
	apiservervalidation "k8s.io/apiserver/pkg/apis/apiserver/validation"
	authenticationcel "k8s.io/apiserver/pkg/authentication/cel"
	authenticationconfigmetrics "k8s.io/apiserver/pkg/server/options/authenticationconfig/metrics"
	"k8s.io/apiserver/pkg/util/filesystem"
	kubeauthenticator "k8s.io/kubernetes/pkg/kubeapiserver/authenticator"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"
)

// serverID labels upstream's metrics of reloads.
const serverID = "watershed"

// reloader reads --authentication-config anew whenever the file changes. A bad one is told of, and the old one stays in
// force (k8s.io/kubernetes/pkg/kubeapiserver/options, BuiltInAuthenticationOptions.ApplyTo).
type reloader struct {
	file      string
	issuers   []string
	anonymous *apiserverconfig.AnonymousAuthConfig
	update    func(context.Context, *apiserverconfig.AuthenticationConfiguration) error
	seen      string
}

func newReloader(file string, c *kubeauthenticator.Config,
	update func(context.Context, *apiserverconfig.AuthenticationConfiguration) error) *reloader {
	r := &reloader{
		file:    file,
		issuers: c.ServiceAccountIssuers,
		update:  update,
		seen:    c.AuthenticationConfigData,
	}
	if c.AuthenticationConfig != nil {
		r.anonymous = c.AuthenticationConfig.DeepCopy().Anonymous
	}
	return r
}

func (r *reloader) run(ctx context.Context) {
	if r.file == "" || r.update == nil {
		return
	}
	authenticationconfigmetrics.RegisterMetrics()
	authenticationconfigmetrics.RecordAuthenticationConfigLastConfigInfo(serverID, r.seen)
	filesystem.WatchUntil(ctx, time.Minute, r.file, func() {
		if err := r.reload(ctx); err != nil {
			authenticationconfigmetrics.RecordAuthenticationConfigAutomaticReloadFailure(serverID)
			slog.Error("--authentication-config was not read anew; what was read before stays in force",
				"file", r.file, "error", err)
		}
	}, func(err error) {
		slog.Error("--authentication-config cannot be watched", "file", r.file, "error", err)
	})
}

func (r *reloader) reload(ctx context.Context) error {
	data, err := os.ReadFile(r.file)
	if err != nil || string(data) == r.seen {
		return err
	}
	// which parses it
	next, err := (&kubeoptions.BuiltInAuthenticationOptions{AuthenticationConfigFile: r.file}).ToAuthenticationConfig()
	if err == nil && next.AuthenticationConfigData != string(data) {
		return errors.New("it changes while it is read")
	}
	if err == nil {
		errs := apiservervalidation.ValidateAuthenticationConfiguration(authenticationcel.NewDefaultCompiler(),
			next.AuthenticationConfig, r.issuers)
		if !reflect.DeepEqual(r.anonymous, next.AuthenticationConfig.Anonymous) {
			errs = append(errs, field.Forbidden(field.NewPath("anonymous"), "changed from initial configuration file"))
		}
		err = errs.ToAggregate()
	}
	if err != nil {
		r.seen = string(data) // it does not become better
		return err
	}
	timed, cancel := context.WithTimeout(ctx, kubeoptions.UpdateAuthenticationConfigTimeout)
	defer cancel()
	if err := r.update(timed, next.AuthenticationConfig); err != nil {
		return fmt.Errorf("it will be tried again: %w", err)
	}
	r.seen = string(data)
	authenticationconfigmetrics.RecordAuthenticationConfigAutomaticReloadSuccess(serverID, r.seen)
	slog.Info("--authentication-config was read anew", "file", r.file)
	return nil
}
