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
	path            string
	initial         string
	issuers         []string
	anonymous       *apiserverconfig.AnonymousAuthConfig
	update          func(context.Context, *apiserverconfig.AuthenticationConfiguration) error
	resetTokenCache func()
}

func newConfigFile(path string, c *kubeauthenticator.Config, h *chain) *configFile {
	f := &configFile{
		path:            path,
		initial:         c.AuthenticationConfigData,
		issuers:         c.ServiceAccountIssuers,
		update:          h.updateJWT,
		resetTokenCache: h.resetTokenCache,
	}
	if c.AuthenticationConfig != nil {
		f.anonymous = c.AuthenticationConfig.DeepCopy().Anonymous
	}
	return f
}

// watch has the file read anew whenever it changes.
func (f *configFile) watch(files *reload.Files) {
	if f.path == "" || f.update == nil {
		return
	}
	authenticationconfigmetrics.RegisterMetrics()
	authenticationconfigmetrics.RecordAuthenticationConfigLastConfigInfo(serverID, f.initial)
	files.Add("authentication-config", f.path, []byte(f.initial), func(ctx context.Context, data []byte) error {
		if err := f.reload(ctx, data); err != nil {
			authenticationconfigmetrics.RecordAuthenticationConfigAutomaticReloadFailure(serverID)
			return err
		}
		authenticationconfigmetrics.RecordAuthenticationConfigAutomaticReloadSuccess(serverID, string(data))
		f.resetTokenCache()
		return nil
	})
}

// reload puts a configuration in force once its issuers have told their keys.
func (f *configFile) reload(ctx context.Context, data []byte) error {
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
	updateCtx, cancel := context.WithTimeout(ctx, updateTimeout)
	defer cancel()
	if err := f.update(updateCtx, next.AuthenticationConfig); err != nil {
		return reload.Retryable(err)
	}
	return nil
}
