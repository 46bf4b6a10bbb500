package authn

import (
	"context"
	"errors"
	"reflect"

	"k8s.io/apimachinery/pkg/util/validation/field"
	apiserverconfig "k8s.io/apiserver/pkg/apis/apiserver"
	apiservervalidation "k8s.io/apiserver/pkg/apis/apiserver/validation"
	authenticationcel "k8s.io/apiserver/pkg/authentication/cel"
	authenticationconfigmetrics "k8s.io/apiserver/pkg/server/options/authenticationconfig/metrics"
	kubeauthenticator "k8s.io/kubernetes/pkg/kubeapiserver/authenticator"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"

	"watershed.dev/platform/reload"
)

// serverID labels upstream's metrics of reloads.
const serverID = "watershed"

// updateTimeout bounds how long new issuers may take to tell their keys.
var updateTimeout = kubeoptions.UpdateAuthenticationConfigTimeout

// configFile is --authentication-config (k8s.io/kubernetes/pkg/kubeapiserver/options,
// BuiltInAuthenticationOptions.ApplyTo).
type configFile struct {
	path      string
	initial   string
	issuers   []string
	anonymous *apiserverconfig.AnonymousAuthConfig
	update    func(context.Context, *apiserverconfig.AuthenticationConfiguration) error
	refresh   func()
}

func newConfigFile(path string, c *kubeauthenticator.Config, h *chain) *configFile {
	f := &configFile{
		path:    path,
		initial: c.AuthenticationConfigData,
		issuers: c.ServiceAccountIssuers,
		update:  h.updateJWT,
		refresh: h.refresh,
	}
	if c.AuthenticationConfig != nil {
		f.anonymous = c.AuthenticationConfig.DeepCopy().Anonymous
	}
	return f
}

// follow has the file read anew whenever it changes.
func (f *configFile) follow(files *reload.Files) {
	if f.path == "" || f.update == nil {
		return
	}
	authenticationconfigmetrics.RegisterMetrics()
	authenticationconfigmetrics.RecordAuthenticationConfigLastConfigInfo(serverID, f.initial)
	files.Add("authentication-config", f.path, []byte(f.initial), func(ctx context.Context, data []byte) error {
		if err := f.apply(ctx, data); err != nil {
			authenticationconfigmetrics.RecordAuthenticationConfigAutomaticReloadFailure(serverID)
			return err
		}
		authenticationconfigmetrics.RecordAuthenticationConfigAutomaticReloadSuccess(serverID, string(data))
		f.refresh()
		return nil
	})
}

// apply puts a configuration in force once its issuers have told their keys.
func (f *configFile) apply(ctx context.Context, data []byte) error {
	// which parses it
	next, err := (&kubeoptions.BuiltInAuthenticationOptions{AuthenticationConfigFile: f.path}).ToAuthenticationConfig()
	if err != nil {
		return err
	}
	if next.AuthenticationConfigData != string(data) {
		return reload.Retryable(errors.New("it changes while it is read"))
	}
	errs := apiservervalidation.ValidateAuthenticationConfiguration(authenticationcel.NewDefaultCompiler(),
		next.AuthenticationConfig, f.issuers)
	if !reflect.DeepEqual(f.anonymous, next.AuthenticationConfig.Anonymous) {
		errs = append(errs, field.Forbidden(field.NewPath("anonymous"), "changed from initial configuration file"))
	}
	if err := errs.ToAggregate(); err != nil {
		return err
	}
	timed, cancel := context.WithTimeout(ctx, updateTimeout)
	defer cancel()
	if err := f.update(timed, next.AuthenticationConfig); err != nil {
		return reload.Retryable(err)
	}
	return nil
}
